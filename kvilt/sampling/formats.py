"""The `format` names that kvilt enforces, each as patterns that must all match and a largest length.

Written from the RFCs that JSON Schema names. Other formats are refused by name where schemas are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class StringFormat:
    """What a string must match, in ECMA-262, and how long it may be."""

    patterns: tuple[str, ...]
    max_length: int | None = None


def _whole(*patterns: str, max_length: int | None = None) -> StringFormat:
    return StringFormat(tuple(f"^(?:{pattern})$" for pattern in patterns), max_length)


# RFC 3339. February 29 exists in years that 4 divides, unless 100 divides them and 400 does not.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR, _MINUTE, _FRACTION = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]", "(?:\\.[0-9]+)?"
_OFFSET = f"(?:[zZ]|[+-]{_HOUR}:{_MINUTE})"
_USUAL_TIME = f"{_HOUR}:{_MINUTE}:[0-5][0-9]{_FRACTION}{_OFFSET}"
_LEAP_UTC = f"23:59:60{_FRACTION}[zZ]"


def _leap_hours() -> str:
    """Times of second 60 whose hour fits the offset: the minute before midnight in UTC is 23:59 plus the offset."""
    ahead = [f"{h:02}:{_MINUTE}:60{_FRACTION}\\+{h:02}:(?:0[1-9]|[1-5][0-9])" for h in range(24)]
    ahead += [f"{(h + 23) % 24:02}:59:60{_FRACTION}\\+{h:02}:00" for h in range(24)]
    behind = [f"{23 - h:02}:{_MINUTE}:60{_FRACTION}-{h:02}:{_MINUTE}" for h in range(24)]
    return "|".join((*ahead, *behind))


def _leap_minutes() -> str:
    """Times of second 60 whose minute fits the offset."""
    ahead = [f"{_HOUR}:{(m + 59) % 60:02}:60{_FRACTION}\\+{_HOUR}:{m:02}" for m in range(60)]
    behind = [f"{_HOUR}:{59 - m:02}:60{_FRACTION}-{_HOUR}:{m:02}" for m in range(60)]
    return "|".join((*ahead, *behind))


_TIMES = tuple(f"(?:{_USUAL_TIME}|{_LEAP_UTC}|{leap})" for leap in (_leap_hours(), _leap_minutes()))
_TIME_PARTS = "[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S"
_DATE_PARTS = "[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D"
_DURATION = f"P(?:(?:{_DATE_PARTS})(?:T(?:{_TIME_PARTS}))?|T(?:{_TIME_PARTS})|[0-9]+W)"

# RFC 3986
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_OCTET}(?:\\.{_OCTET}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_LAST_32 = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"


def _ipv6() -> str:
    forms = [f"(?:{_GROUP}:){{6}}{_LAST_32}", f"::(?:{_GROUP}:){{5}}{_LAST_32}"]
    for before in range(5):
        left = f"(?:(?:{_GROUP}:){{0,{before}}}{_GROUP})?"
        middle = f"(?:{_GROUP}:){{{4 - before}}}" if before < 4 else ""
        forms.append(f"{left}::{middle}{_LAST_32}")
    forms += [f"(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}", f"(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::"]
    return f"(?:{'|'.join(forms)})"


_IPV6 = _ipv6()
_UNRESERVED = "A-Za-z0-9\\-._~!$&'()*+,;="  # with the sub-delimiters
_ENCODED = "%[0-9A-Fa-f]{2}"
_PCHAR = f"(?:[{_UNRESERVED}:@]|{_ENCODED})"
_USER = f"(?:[{_UNRESERVED}:]|{_ENCODED})*@"
_HOST = f"(?:\\[(?:{_IPV6}|[vV][0-9A-Fa-f]+\\.[{_UNRESERVED}:]+)\\]|(?:[{_UNRESERVED}]|{_ENCODED})*)"
_AUTHORITY = f"//(?:{_USER})?{_HOST}(?::[0-9]*)?(?:/{_PCHAR}*)*"
_ABSOLUTE = f"/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
_ROOTLESS = f"{_PCHAR}+(?:/{_PCHAR}*)*"
_NO_SCHEME = f"(?:[{_UNRESERVED}@]|{_ENCODED})+(?:/{_PCHAR}*)*"
_ENDING = f"(?:\\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_URI = f"[A-Za-z][A-Za-z0-9+.\\-]*:(?:{_AUTHORITY}|{_ABSOLUTE}|{_ROOTLESS})?{_ENDING}"
_RELATIVE = f"(?:{_AUTHORITY}|{_ABSOLUTE}|{_NO_SCHEME})?{_ENDING}"

# RFC 1123 and RFC 5321
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9\\-]{0,61}[A-Za-z0-9])?"
_DOMAIN_PART = "[A-Za-z0-9](?:[A-Za-z0-9\\-]*[A-Za-z0-9])?"
_ATOM = "[A-Za-z0-9!#$%&'*+\\-/=?^_`{|}~]+"
_QUOTED = '"(?:[ !#-\\[\\]-~]|\\\\[ -~])*"'
_MAIL_HOST = f"(?:{_DOMAIN_PART}(?:\\.{_DOMAIN_PART})*|\\[(?:{_IPV4}|IPv6:{_IPV6})\\])"
_EMAIL = f"(?:{_ATOM}(?:\\.{_ATOM})*|{_QUOTED})@{_MAIL_HOST}"

_HEX = "[0-9A-Fa-f]"
_UUID = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"  # RFC 6901

FORMATS: Mapping[str, StringFormat] = MappingProxyType(
    {
        "date": _whole(_DATE),
        "time": _whole(*_TIMES),
        "date-time": _whole(*(f"{_DATE}[tT]{time}" for time in _TIMES)),
        "duration": _whole(_DURATION),
        "email": _whole(_EMAIL),
        "hostname": _whole(f"{_LABEL}(?:\\.{_LABEL})*", max_length=253),
        "ipv4": _whole(_IPV4),
        "ipv6": _whole(_IPV6),
        "uri": _whole(_URI),
        "uri-reference": _whole(f"{_URI}|{_RELATIVE}"),
        "uuid": _whole(_UUID),
        "json-pointer": _whole(_POINTER),
        "relative-json-pointer": _whole(f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})"),
    }
)
