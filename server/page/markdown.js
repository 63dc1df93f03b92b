// The little formatting that answers get: what kind of line it is, and which parts of it are code, bold or italic.
// It returns positions and makes no markup, so whatever a model writes can only become text.

const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*/g;
const MARKERS = { code: 1, strong: 2, em: 1 }; // characters on each side

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

/** Parts of a line from position `from`: {start, end, style}; marks belong to no part. */
export function inlineParts(text, from = 0) {
  const parts = [];
  let at = from;
  INLINE.lastIndex = from;
  for (let match; (match = INLINE.exec(text)); ) {
    const style = match[1] ? "code" : match[2] ? "strong" : "em";
    const mark = MARKERS[style];
    if (match.index > at) parts.push({ start: at, end: match.index, style: "" });
    parts.push({ start: match.index + mark, end: match.index + match[0].length - mark, style });
    at = match.index + match[0].length;
  }
  if (at < text.length) parts.push({ start: at, end: text.length, style: "" });
  return parts;
}
