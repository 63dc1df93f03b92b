"""The score of `local_words`."""


def process_results(doc, results):
    """Share of the sorted words whose place in the answer is right."""
    wanted, found = doc["check"]["items"], results[0].replace(",", " ").split()
    return {"share": sum(a == b for a, b in zip(wanted, found, strict=False)) / len(wanted)}
