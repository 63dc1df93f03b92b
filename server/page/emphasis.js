// Which asterisks may be marks of emphasis: CommonMark's rules of flanking, kinder to CJK and stricter to formulas.

// CJK text has no spaces between words, so asterisks may touch it on both sides.
const CJK = /[\p{scx=Han}\p{scx=Hiragana}\p{scx=Katakana}\p{scx=Hangul}\u3000-\u303f\uff00-\uffef]/u;

// Asterisks of formulas and names: those of `2*x*(y)`, `*.py` and `"*"` are no marks, and two powers enclose nothing.
const LITERAL = /[A-Za-z\p{sc=Greek}\p{N})\]]\*[A-Za-z\p{sc=Greek}\p{N}(]|\*\.\w|(["'])\*\1/u;
const POWER = /\d\*\*[A-Za-z\d]|[A-Za-z\d]\*\*\d|(?<![A-Za-z\d])[A-Za-z]\*\*[A-Za-z]/;

// Beside punctuation on the other side, too, these neither begin nor end emphasis: `f(*)`, `/usr/*/bin`, `a.*, b.*`.
const NEVER_FIRST = /[\p{Pe},;:!?]/u;
const NEVER_LAST = /[\p{Ps},/=]/u;

/** Of a run of asterisks: whether it may begin or end emphasis, and whether it may mean a power. */
export function sidesOf(text, { run, start, end }) {
  const [head, tail] = [text.slice(Math.max(start - 2, 0), start), text.slice(end, end + 2)];
  if (run === "*" && LITERAL.test(head + run + tail)) return {};
  const [before, after] = [[...head].at(-1) ?? " ", [...tail][0] ?? " "]; // whole characters
  const [left, right] = [kindOf(before), kindOf(after)];
  return {
    opens: mayTouch(right, left) && !(left === "mark" && NEVER_FIRST.test(after)),
    closes: mayTouch(left, right) && !(right === "mark" && NEVER_LAST.test(before)),
    isPower: run === "**" && POWER.test(head + run + tail),
  };
}

function mayTouch(inside, outside) {
  return inside !== "space" && (inside !== "mark" || outside !== "letter");
}

function kindOf(character) {
  if (/\s/.test(character)) return "space";
  if (CJK.test(character)) return "cjk";
  return /[\p{P}\p{S}]/u.test(character) ? "mark" : "letter";
}
