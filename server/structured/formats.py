"""The values of `format` that answers are bound to, as regular expressions.

Each accepts a part of what its standard does: years have four digits and do not begin with 0, and hosts are ASCII.
"""

_MONTH_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_LEAP_YEAR = r"(?:[1-9]\d(?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE = rf"(?:[1-9]\d{{3}}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_CLOCK}:[0-5]\d(?:\.\d{{1,6}})?(?:Z|[+-]{_CLOCK})"
_HOURS = r"(?:\d{1,6}H(?:\d{1,6}M(?:\d{1,6}S)?)?|\d{1,6}M(?:\d{1,6}S)?|\d{1,6}S)"
_DAYS = r"(?:\d{1,6}Y(?:\d{1,6}M(?:\d{1,6}D)?)?|\d{1,6}M(?:\d{1,6}D)?|\d{1,6}D)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_HOST = rf"(?:{_LABEL}\.){{0,4}}[A-Za-z](?:[A-Za-z0-9-]{{0,30}}[A-Za-z0-9])?"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_GROUP = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    (
        rf"(?:{_GROUP}:){{7}}{_GROUP}",
        *(rf"{_GROUP}(?::{_GROUP}){{{num - 1}}}::(?:{_GROUP}(?::{_GROUP}){{0,{5 - num}}})?" for num in range(1, 6)),
        rf"::(?:{_GROUP}(?::{_GROUP}){{0,5}})?",
    )
)
_URL_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
# RFC 3986 bounds no lengths, and every position that is counted takes a mask of the whole vocabulary: 4 ms for 200,000.
_NAME_END = r"(?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_REG_NAME = rf"(?:[A-Za-z0-9]{_NAME_END}\.)*[A-Za-z]{_NAME_END}"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]+://(?:{_REG_NAME}|{_IPV4})(?::[1-9]\d{{0,3}})?(?:/{_URL_CHAR}*)*"
    rf"(?:\?(?:{_URL_CHAR}|[/?])*)?(?:#(?:{_URL_CHAR}|[/?])*)?"
)
_MAILBOX = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,32}"
_EMAIL = rf"{_MAILBOX}(?:\.{_MAILBOX})?@(?:{_LABEL}\.){{1,4}}[A-Za-z]{{2,24}}"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"

PATTERN_OF_FORMAT = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": rf"P(?:\d{{1,6}}W|{_DAYS}(?:T{_HOURS})?|T{_HOURS})",
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "uri": _URI,
    "iri": _URI,
    "uri-reference": _URI,
    "iri-reference": _URI,
    "uri-template": _URI,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d{{0,5}})(?:#|{_POINTER})",
}

NOTES = frozenset(
    {"binary", "byte", "char", "decimal", "directory-path", "file-path", "html", "markdown", "password", "path", "text"}
)
"""Formats that describe a string and put no rule on its characters."""
