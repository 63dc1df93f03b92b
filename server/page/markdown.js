// The little formatting that answers get: what kind of line it is, and which parts of it are code, bold or italic.
// It returns positions and makes no markup, so whatever a model writes can only become text.

// Code stands between equal numbers of backticks. Asterisks are emphasis only where they enclose text closely and follow
// no letter or digit, so that products, powers, pointers and `**kwargs` keep theirs.
const INLINE = /(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)|(?<![\w*])(\*{1,3})(?=[^\s*])[^*]+(?<=\S)\2(?!\*)/g;
const FENCE = /^\s*(`{3,})([^`]{0,80})$/;

/** Kind of a line, and how many characters of its head are only marks. */
export function lineKind(text) {
  const heading = /^(#{1,6})\s+/.exec(text);
  if (heading) return { kind: heading[1].length < 3 ? "heading" : "subheading", skip: heading[0].length };
  const item = /^(\s*)([-*+]|\d{1,9}[.)])\s+/.exec(text);
  if (item) return { kind: "item", skip: item[0].length, mark: /\d/.test(item[2]) ? item[2] : "•", depth: item[1].length >> 1 };
  if (text.startsWith("> ")) return { kind: "quote", skip: 2 };
  if (/^\s*\|.*\|\s*$/.test(text)) return { kind: "row", skip: 0 };
  if (/^\s*(-{3,}|\*{3,})\s*$/.test(text)) return { kind: "rule", skip: text.length };
  return { kind: text.trim() ? "plain" : "blank", skip: 0 };
}

/** Of a line that opens a block of code: its number of backticks and what it says of the block. Null for other lines. */
export function openingFence(text) {
  const match = FENCE.exec(text);
  return match && { numTicks: match[1].length, label: match[2].trim() };
}

/** Whether a line ends a block of code that `numTicks` backticks have opened. */
export function isClosingFence(text, numTicks) {
  const fence = openingFence(text);
  return fence !== null && !fence.label && fence.numTicks >= numTicks;
}

/** Parts of a line from position `from`: {start, end, style}; marks belong to no part. */
export function inlineParts(text, from = 0) {
  const parts = [];
  let at = from;
  INLINE.lastIndex = from;
  for (let match; (match = INLINE.exec(text)); ) {
    const style = match[1] ? "code" : match[2].length > 1 ? "strong" : "em";
    const mark = (match[1] ?? match[2]).length;
    if (match.index > at) parts.push({ start: at, end: match.index, style: "" });
    parts.push({ start: match.index + mark, end: match.index + match[0].length - mark, style });
    at = match.index + match[0].length;
  }
  if (at < text.length) parts.push({ start: at, end: text.length, style: "" });
  return parts;
}
