"""Writes facts/*.jsonl from packages with permissive licences; run once by a person, never while training.

Needs countryinfo, babel and mendeleev installed and the WordNet 3.0 files unpacked:
    python -m tools.tiny_models.data.extract_facts --wordnet /usr/share/wordnet
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import re
import sqlite3
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parent / "facts"
SOURCES = {
    "countryinfo": {"source": "countryinfo 1.0.1", "licence": "MIT"},
    "babel": {"source": "babel 2.19.0 (Unicode CLDR)", "licence": "BSD-3-Clause, Unicode-3.0"},
    "mendeleev": {"source": "mendeleev 1.3.0", "licence": "MIT"},
    "wordnet": {"source": "WordNet 3.0 (Princeton University)", "licence": "WordNet-3.0"},
}
SOUTH_AMERICA = {"AR", "BO", "BR", "CL", "CO", "EC", "GY", "PY", "PE", "SR", "UY", "VE"}
# Where CLDR lists a neighbour's money first, or a language that is a variant of another in the list.
CURRENCIES = {"BT": "Bhutanese Ngultrum", "LS": "Lesotho Loti", "NA": "Namibian Dollar", "ZW": "Zimbabwe Gold"}
VARIANTS = {"Swiss German", "Norwegian Bokmal", "Norwegian Nynorsk", "Central Atlas Tamazight", "Yoruba"}
LANGUAGES = {"TW": ["Chinese"]}
# Words that a stranger should not meet in an example, in rot13 so that nobody meets them here either.
HIDDEN = "frk frkhny encr anxrq ahqr ivetva fynir arteb juber onfgneq oernfg cravf qnza avttre"
UNWANTED = set(codecs.decode(HIDDEN, "rot13").split())
# CLDR names that nobody types, and the names people do type.
COMMON_NAMES = {
    "TR": "Turkey", "CI": "Ivory Coast", "MM": "Myanmar", "CD": "Democratic Republic of the Congo",
    "CG": "Republic of the Congo", "CZ": "Czech Republic", "BA": "Bosnia and Herzegovina",
    "VC": "Saint Vincent and the Grenadines", "KN": "Saint Kitts and Nevis", "LC": "Saint Lucia",
    "TT": "Trinidad and Tobago", "AG": "Antigua and Barbuda", "ST": "Sao Tome and Principe",
}  # fmt: skip
ALIASES = {
    "US": ["USA", "the US", "America"], "GB": ["UK", "Great Britain", "Britain"], "CZ": ["Czechia"],
    "CI": ["Cote d'Ivoire"], "MM": ["Burma"], "NL": ["Holland"], "AE": ["UAE"], "TR": ["Turkiye"],
    "CD": ["DR Congo", "DRC"],
}  # fmt: skip
WITH_ARTICLE = {"US", "GB", "NL", "PH", "BS", "GM", "MV", "AE", "CD", "CG", "DO", "CF", "CZ", "SB", "KM", "SC", "MH"}
# The two packages disagree or are out of date here; values as the countries themselves state them.
CAPITALS = {
    "KZ": "Astana", "LK": "Colombo", "BI": "Gitega", "BO": "Sucre", "ZA": "Pretoria", "IL": "Jerusalem",
    "GQ": "Malabo", "NR": "Yaren", "PW": "Ngerulmud", "CI": "Yamoussoukro", "TZ": "Dodoma", "BJ": "Porto-Novo",
    "MY": "Kuala Lumpur", "ME": "Podgorica", "UA": "Kyiv", "US": "Washington, D.C.", "MM": "Naypyidaw",
    "VA": "Vatican City", "MC": "Monaco", "SZ": "Mbabane", "NG": "Abuja",
}  # fmt: skip


def plain(text: str) -> str:
    """ASCII form of a name: accents dropped, typographic quotes made straight."""
    text = text.replace("’", "'").replace("ʻ", "'")
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def continent_of(iso: str, region: str) -> str | None:
    """One of six continents, None where the package says nothing."""
    if region == "Americas":
        return "South America" if iso in SOUTH_AMERICA else "North America"
    return region if region in {"Africa", "Asia", "Europe", "Oceania"} else None


def countries() -> Iterable[dict[str, Any]]:
    """One row for each country that has all four facts."""
    import countryinfo
    from babel import Locale
    from babel.languages import get_official_languages
    from babel.numbers import get_territory_currencies

    english = Locale("en")
    seen: set[str] = set()
    for country in countryinfo.all_countries():
        info = country.info()
        iso = info.get("ISO", {}).get("alpha2", "")
        # Dependent territories are left out: few people ask, and the sources disagree on them.
        if iso not in english.territories or iso not in SOVEREIGN - seen:
            continue
        seen.add(iso)
        name = COMMON_NAMES.get(iso, plain(english.territories[iso]).replace("&", "and").replace("St.", "Saint"))
        codes = [c for c in get_official_languages(iso, de_facto=True) if c in english.languages]
        spoken = [plain(english.languages[code]) for code in codes]
        languages = LANGUAGES.get(iso, [name for name in spoken if name not in VARIANTS][:3])
        money = get_territory_currencies(iso)
        listed = info.get("capital") or ""  # a list where a country has several
        capital = CAPITALS.get(iso, plain(listed if isinstance(listed, str) else listed[0]))
        continent = continent_of(iso, info.get("region", ""))
        if not (capital and continent and languages and money):
            continue
        yield {
            "kind": "country",
            "iso": iso,
            "name": name,
            "article": iso in WITH_ARTICLE,
            "aliases": ALIASES.get(iso, []),
            "capital": capital,
            "currency": CURRENCIES.get(iso, plain(english.currencies[money[0]]).replace("&", "and")),
            "languages": languages,
            "continent": continent,
            "from": ["countryinfo", "babel"],
        }


SOVEREIGN = set(
    "AF AL DZ AD AO AG AR AM AU AT AZ BS BH BD BB BY BE BZ BJ BT BO BA BW BR BN BG BF BI CV KH CM CA CF TD CL CN CO "
    "KM CD CG CR CI HR CU CY CZ DK DJ DM DO EC EG SV GQ ER EE SZ ET FJ FI FR GA GM GE DE GH GR GD GT GN GW GY HT HN "
    "HU IS IN ID IR IQ IE IL IT JM JP JO KZ KE KI KP KR KW KG LA LV LB LS LR LY LI LT LU MG MW MY MV ML MT MH MR MU "
    "MX FM MD MC MN ME MA MZ MM NA NR NP NL NZ NI NE NG MK NO OM PK PW PA PG PY PE PH PL PT QA RO RU RW KN LC VC WS "
    "SM ST SA SN RS SC SL SG SK SI SB SO ZA SS ES LK SD SR SE CH SY TW TJ TZ TH TL TG TO TT TN TR TM TV UG UA AE GB "
    "US UY UZ VU VA VE VN YE ZM ZW".split()
)


def elements() -> Iterable[dict[str, Any]]:
    """The 118 elements: name, symbol, atomic number, period and series."""
    import mendeleev

    path = os.path.join(os.path.dirname(mendeleev.__file__), "elements.db")
    query = (
        "select e.atomic_number, e.name, e.symbol, e.period, s.name from elements e join series s on s.id=e.series_id "
        "order by 1"
    )
    for number, name, symbol, period, series in sqlite3.connect(path).execute(query):
        yield {
            "kind": "element", "name": plain(name).lower(), "symbol": symbol, "number": number,
            "period": period, "series": series.lower(), "from": ["mendeleev"],
        }  # fmt: skip


def lemma_counts(folder: Path) -> Counter[tuple[str, str]]:
    """How often each (lemma, part of speech) was seen in the texts that WordNet's authors tagged."""
    names = {"1": "noun", "2": "verb", "3": "adj", "5": "adj", "4": "adv"}
    counts: Counter[tuple[str, str]] = Counter()
    for line in (folder / "cntlist.rev").read_text().splitlines():
        sense, _, count = line.split()
        lemma, _, rest = sense.partition("%")
        if re.fullmatch(r"[a-z]{3,9}", lemma):
            counts[lemma, names[rest[0]]] += int(count)
    return counts


def first_gloss(folder: Path) -> dict[str, str]:
    """The definition of each noun's first sense."""
    glosses = {}
    for line in (folder / "data.noun").read_text().splitlines():
        if not line.startswith("  "):
            glosses[line[:8]] = line.partition("| ")[2].split(";")[0].strip()
    result = {}
    for line in (folder / "index.noun").read_text().splitlines():
        if not line.startswith("  "):
            fields = line.split()
            result[fields[0]] = glosses[fields[6 + int(fields[3])]]
    return result


def words(folder: Path) -> Iterable[dict[str, Any]]:
    """Common words by part of speech, each word once, most frequent part first."""
    limits = {"noun": 1800, "verb": 350, "adj": 350}
    seen: set[str] = set()
    for (lemma, part), _ in lemma_counts(folder).most_common():
        if limits.get(part, 0) > 0 and lemma not in seen | UNWANTED:
            limits[part] -= 1
            seen.add(lemma)
            yield {"kind": "word", "word": lemma, "part": part, "from": ["wordnet"]}


def definitions(folder: Path, limit: int = 400) -> Iterable[dict[str, Any]]:
    """Short definitions of concrete, common nouns."""
    glosses = first_gloss(folder)
    found = 0
    for (lemma, part), _ in lemma_counts(folder).most_common():
        gloss = plain(glosses.get(lemma, ""))
        short = 15 <= len(gloss) <= 60 and re.fullmatch(r"[a-z ,'-]+", gloss) and lemma not in gloss
        if part == "noun" and len(lemma) >= 4 and short and lemma not in UNWANTED and found < limit:
            found += 1
            yield {"kind": "definition", "word": lemma, "definition": gloss, "from": ["wordnet"]}


def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line; the first line names the sources."""
    items = list(rows)
    used = sorted({source for row in items for source in row.pop("from")})
    head = {"kind": "sources", "sources": [SOURCES[source] for source in used], "rows": len(items)}
    text = "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in [head, *items])
    (FACTS / name).write_text(text)
    print(f"{name}: {len(items)} rows, {len(text)} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--wordnet", type=Path, required=True, help="folder with data.noun and cntlist.rev")
    folder = parser.parse_args().wordnet
    FACTS.mkdir(exist_ok=True)
    write("countries.jsonl", countries())
    write("elements.jsonl", elements())
    write("words.jsonl", words(folder))
    write("definitions.jsonl", definitions(folder))


if __name__ == "__main__":
    main()
