// The little formatting that answers get: what kind of line it is, and which parts of it are code, bold or italic.
// It returns positions and makes no markup, so whatever a model writes can only become text.
import { sidesOf } from "./emphasis.js";

const FENCE = /^\s*(`{3,})([^`]*)$/;

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
  const depths = { code: 0, strong: 0, em: 0 };
  const style = () => Object.keys(depths).find((each) => depths[each]) ?? ""; // the first that is open
  let at = from;
  for (const mark of marks(text, from)) {
    if (mark.start > at) parts.push({ start: at, end: mark.start, style: style() });
    depths[mark.style] += mark.step;
    at = mark.end;
  }
  if (at < text.length) parts.push({ start: at, end: text.length, style: "" });
  return parts;
}

/**
 * Runs of backticks or asterisks that begin (step 1) or end (step -1) a style: {start, end, style, step}. Two runs that
 * belong together are equally long, and nothing inside of code is a mark.
 */
function marks(text, from) {
  const found = [...text.matchAll(/`+|\*+/g)].filter((match) => match.index >= from);
  const runs = found.map(({ 0: run, index }) => ({ run, start: index, end: index + run.length }));
  const nextEqual = {};
  for (const each of [...runs].reverse()) {
    each.next = nextEqual[each.run];
    nextEqual[each.run] = each;
  }
  const waiting = { "*": [], "**": [], "***": [] }; // runs that may begin emphasis
  let codeEnd = 0;
  for (const each of runs) {
    if (each.start < codeEnd) continue;
    if (each.run in waiting) {
      Object.assign(each, sidesOf(text, each));
      const opener = waiting[each.run].at(-1);
      if (each.closes && opener && !(each.isPower && opener.isPower)) {
        join(opener, each, each.run === "*" ? "em" : "strong");
        for (const list of Object.values(waiting)) while (list.at(-1)?.start >= opener.start) list.pop();
      } else if (each.opens) waiting[each.run].push(each);
    } else if (each.run[0] === "`" && each.next) {
      join(each, each.next, "code");
      codeEnd = each.next.end;
    }
  }
  return runs.filter((each) => each.style);
}

function join(first, last, style) {
  Object.assign(first, { style, step: 1 });
  Object.assign(last, { style, step: -1 });
}
