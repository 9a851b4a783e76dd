"""Records to text."""

from __future__ import annotations

import json
import os
import textwrap
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .source import STORING, Owner, Written, copying, owner_of
from .violations import Conversion, Role, Site, TensorMeta, Violation

_WIDTH = 100  # source lines and sentences are clipped or wrapped to this
_NAME = 40  # a longer expression is no name to use in a sentence


def render(violation: Violation) -> str:
    """The message of a :class:`~dispatch_guard.ToMutationError`."""
    conversion = violation.conversion
    lines = [headline(violation), ""]
    for earlier in _earlier(conversion)[-2:]:
        lines += _place(earlier.site, earlier.module, f"{_name(earlier)} first converted here")
    lines += _place(conversion.site, conversion.module, _converted(conversion))
    lines += _place(violation.site, violation.module, _written(violation))
    lines += ["", *_why(violation), ""]
    lines += [f"  help: {'or ' if number else ''}{line}" for number, line in enumerate(violation.help)]
    lines += ['  to allow this write: with dispatch_guard.allow_mutation("why it is safe")']
    return "\n".join(lines)


def headline(violation: Violation) -> str:
    """The first line of the message, which stands alone."""
    return f"in-place {violation.call or violation.op} on the {violation.role} of {violation.conversion.call}"[:119]


def _earlier(conversion: Conversion) -> list[Conversion]:
    """The conversions before this one in its chain that are at other places, first to last."""
    chain: list[Conversion] = []
    via = conversion.via
    while via is not None:
        if via.site != conversion.site and all(via.site != known.site for known in chain):
            chain.insert(0, via)
        via = via.via
    return chain


def _place(site: Site | None, module: str, label: str) -> list[str]:
    if site is None:
        return [f"  {label}"]
    lines = [f"  {site.filename}:{site.lineno}, in {site.function}" + (f" ({module})" if module else "")]
    if not site.line.strip():
        return [*lines, f"      {label} (the source is not available)", *_caller(site)]
    code, underline = _underlined(site)
    lines += [f"      {line}" for line in code]
    if len(underline) + len(label) < _WIDTH + 14:
        return [*lines, f"      {underline} {label}", *_caller(site)]
    return [*lines, f"      {underline}", *_wrapped(label, 6), *_caller(site)]


def _wrapped(text: str, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        text, _WIDTH, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )


def _underlined(site: Site) -> tuple[list[str], str]:
    """The lines of code to show, and what to put under the last one of them.

    An expression over several lines is underlined on its first and its last one.
    """
    lines = site.lines or (site.line,)
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    dedented = [line[indent:].rstrip() for line in lines]
    start = None if site.col is None else max(0, site.col - indent)
    end = None if site.end_col is None or site.end_lineno is None else max(0, site.end_col - indent)
    if len(dedented) == 1:
        text, underline = _marked(dedented[0], start, end if site.end_lineno == site.lineno else None)
        return [text], underline
    first, first_underline = _marked(dedented[0], start, None)
    last, underline = _marked(dedented[-1], None, end)
    between = [line[:_WIDTH] for line in dedented[1:-1]]
    return [first, first_underline, *(between if len(between) < 3 else [between[0], "..."]), last], underline


def _marked(text: str, start: int | None, end: int | None) -> tuple[str, str]:
    """``text``, clipped, and what underlines it from ``start`` to ``end``; ``None`` is as far as it goes."""
    start = len(text) - len(text.lstrip()) if start is None else start
    end = len(text) if end is None else end
    if len(text) > _WIDTH:  # keep what is underlined
        skip = max(0, min(start, len(text) - _WIDTH))
        text, start, end = text[skip : skip + _WIDTH], start - skip, end - skip
    blank = "".join("\t" if char == "\t" else " " * _columns(char) for char in text[:start])
    return text, blank + "^" * max(1, sum(_columns(char) for char in text[start:end]))


def _columns(char: str) -> int:
    """How many columns of a terminal a character takes."""
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _caller(site: Site) -> list[str]:
    caller = site.caller
    return [f"      called from {caller.filename}:{caller.lineno}: {caller.line.strip()[:_WIDTH]}"] if caller else []


def _converted(conversion: Conversion) -> str:
    source, result = _name(conversion), _result_name(conversion)
    was = _kind(conversion.source)
    if conversion.copied:
        return f"converted here; {source} was {was}, so {result} is a copy ({_kind(conversion.result)})"
    return f"converted here; {source} was already {was}, so {result} is {source} itself (an alias)"


def _name(conversion: Conversion) -> str:
    """What to call the source of a conversion."""
    return conversion.expression if 0 < len(conversion.expression) <= _NAME else "the source"


def _result_name(conversion: Conversion) -> str:
    """What to call the result: not the name that it takes over from the source."""
    taken_over = conversion.target == conversion.expression
    return conversion.target if 0 < len(conversion.target) <= _NAME and not taken_over else "the result"


def _other_name(role: Role, conversion: Conversion) -> str:
    """What to call the side that is not written."""
    if role == "source":
        return _result_name(conversion)
    name = _name(conversion)
    return f"the earlier {name}" if conversion.target == conversion.expression == name else name


def _kind(meta: TensorMeta) -> str:
    return f"{str(meta.dtype).removeprefix('torch.')} on {meta.device}"


def _written(violation: Violation) -> str:
    if violation.kind == "unseen":
        return "written in place since, where no mode could see it (another thread, or modes turned off)"
    if violation.site is None:
        return "written in place since, at a line that torch has not kept"
    meta, conversion = violation.written, violation.conversion
    if violation.expression.isidentifier() and violation.expression not in (conversion.expression, conversion.target):
        side = _name(conversion) if violation.role == "source" else _result_name(conversion)
        return f"written in place here; {violation.expression} shares memory with {side}"
    of = conversion.source if violation.role == "source" else conversion.result
    if meta is not None and meta.shape != of.shape:
        shape = ", ".join(map(str, meta.shape))
        return f"written in place here, through a view of the {violation.role} of shape ({shape})"
    return "written in place here"


def _why(violation: Violation) -> list[str]:
    conversion = violation.conversion
    other, call = _other_name(violation.role, conversion), f"{conversion.call.split('.')[1]}()"
    if conversion.copied:
        text = (
            f"Here the write leaves {other} as it is. On a device or dtype where {call} has nothing to do, it would "
            "change it: the exported program can keep only one of the two."
        )
    else:
        text = (
            f"Here the write also changes {other}. On a device or dtype where {call} must copy, it would not: the "
            "exported program can keep only one of the two."
        )
    return _wrapped(text, 2)


# ---- help


def role_of(role: Role, conversion: Conversion, expression: str) -> Role:
    """Which side was written, when both are the same tensor here: the one that the source names.

    Example:
        >>> from dispatch_guard.report import role_of
        >>> import torch
        >>> from dispatch_guard import Conversion, TensorMeta
        >>> meta = TensorMeta(torch.float32, torch.device("cpu"), (3,))
        >>> conversion = Conversion("Tensor.to", "'cpu'", False, meta, meta, None, "", expression="y", target="z")
        >>> role_of("result", conversion, "y"), role_of("result", conversion, "z")
        ('source', 'result')
    """
    if conversion.copied or not expression or expression == conversion.target:
        return role
    return "source" if expression == conversion.expression else role


def advice(
    argument: str,
    conversion: Conversion,
    written: Written | None,
    site: Site | None,
    inplace: str | None,
    role: Role = "result",
) -> tuple[str, ...]:
    """What to do about a write, a line each; every line is proven by a test.

    Args:
        argument: the argument of the operator that is written.
        conversion: the conversion before it.
        written: the write in the user's source, where it can be told.
        site: where the write is.
        inplace: the path of a module with ``inplace=True`` that writes, if one does.
        role: the side of the conversion that is written.

    Returns:
        The lines, the best first.
    """
    move = "move the write before the conversion, if it is meant to change both"
    if role == "result" and (kept := _writing_back(conversion, written, inplace)) is not None:
        return (kept, move)
    own = _own_way(argument, conversion, written, site, inplace)
    if role == "source" and written is not None and _outlives(conversion):
        own = None  # a new tensor under the same name is not the one that others have
    return tuple(line for line in (own, _copy_way(conversion, written, role), move) if line is not None)


def _outlives(conversion: Conversion) -> Owner | None:
    """Who else has the tensor that was converted, as far as the source tells."""
    return owner_of(conversion.expression, conversion.site) if conversion.site else None


def _writing_back(conversion: Conversion, written: Written | None, inplace: str | None) -> str | None:
    """How a write to the result reaches what was converted on every device, if it is an update that others are to see.

    That is so for what an object holds (a buffer), and for an argument where the write stores values in it; other
    writes to what came of an argument are taken for work on a value, of which the caller is to see nothing.
    """
    source, target = conversion.expression, conversion.target
    owner = _outlives(conversion)
    stores = written is not None and written.name in STORING
    if owner is None or target == source or (written is None and inplace is None):
        return None
    if owner == "caller" and (conversion.copied or not stores):
        return None
    if not target:
        return f"write to {source} itself, without a conversion"
    copy = copying(conversion.text, str(conversion.result.dtype)) if len(conversion.text) <= 80 else None
    copied = f"{target} = {copy}" if copy is not None else f"convert {source} with copy=True"
    lost = f"if this is to update {source}, which it does not do here: " if conversion.copied else ""
    return f"{lost}take a copy and write it back: {copied}, and after the write {source}.copy_({target})"


def _own_way(
    argument: str, conversion: Conversion, written: Written | None, site: Site | None, inplace: str | None
) -> str | None:
    """What fits how the write is written."""
    if inplace is not None:
        return f"set inplace=False on the module {inplace or 'that writes'}"
    if written is not None and written.kind == "inplace":
        return "pass inplace=False and use what is returned"
    if written is not None:
        # Under another name it is a view, or what others are to see changed: to give that name a new tensor won't do.
        named = written.base in (conversion.expression, conversion.target) and _in_one_function(conversion, written)
        chained = written.base == conversion.text  # x.float().add_(1)
        if written.instead is not None and written.base == written.expression and (named or chained):
            return f"write out of place: {written.instead}"
        cloned = f"write to a copy of your own: {written.base} = {written.base}.clone() before this line"
        return cloned if named else None
    if _is_statistic(argument):
        return f"convert a copy of {argument}, or convert it after the module has run"
    if site is not None and ".step(" in site.line:
        return "convert a copy of the parameter, or convert it after the optimizer's step"
    return None


def _in_one_function(conversion: Conversion, written: Written) -> bool:
    """Whether a name means the same at both places."""
    here, there = written.site, conversion.site
    return there is not None and (here.filename, here.function) == (there.filename, there.function)


def _is_statistic(argument: str) -> bool:
    return argument in ("running_mean", "running_var")


def _copy_way(conversion: Conversion, written: Written | None, role: Role) -> str:
    copy = copying(conversion.text, str(conversion.result.dtype)) if len(conversion.text) <= 80 else None
    if copy is not None:
        return f"take a copy of your own at the conversion: {copy}"
    if role == "source":
        return f"convert a copy of {_name(conversion)}, made by clone()"
    if conversion.target and written is not None and written.base == conversion.target:
        return f"take a copy of your own: {conversion.target} = {conversion.target}.clone() after the conversion"
    return "take a copy of your own at the conversion: to(..., copy=True)"


# ---- reports of many

FORMATS = ("text", "json", "sarif", "github")
JSON_VERSION = 2


def report(violations: Sequence[Violation], conversions: int, format: str = "text") -> str:
    """All violations in one text, those with the same two places folded, in the order of their places.

    Args:
        violations: what a guard has recorded; allowed ones are left out of all but the JSON.
        conversions: how many conversions the guard has seen.
        format: ``"text"``, ``"json"``, ``"sarif"`` (2.1.0) or ``"github"`` (workflow commands).

    Returns:
        The report.

    Raises:
        ValueError: for another format.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(map(repr, FORMATS))}, not {format!r}")
    groups = _folded(violations)
    if format == "json":
        return json.dumps(_json(groups, conversions), indent=2)
    groups = [(violation, count) for violation, count in groups if violation.allowed is None]
    if format == "sarif":
        return json.dumps(_sarif(groups), indent=2)
    if format == "github":
        return "\n".join(_github(violation, count) for violation, count in groups)
    texts = [render(violation) + (f"\n\n  ({count} times)" if count > 1 else "") for violation, count in groups]
    return "\n\n".join([*texts, f"{conversions} conversions, {sum(count for _, count in groups)} violations"])


def in_order(violations: Sequence[Violation]) -> list[Violation]:
    """One violation for each of those that the report tells, in its order."""
    return [violation for violation, _ in _folded(violations)]


def _folded(violations: Sequence[Violation]) -> list[tuple[Violation, int]]:
    groups: dict[Any, list[Violation]] = {}
    for violation in violations:
        key = (violation.site, violation.conversion.site, violation.role, violation.allowed)
        groups.setdefault(key, []).append(violation)
    folded = [(group[0], len(group)) for group in groups.values()]
    return sorted(folded, key=lambda pair: _order(pair[0].site) + _order(pair[0].conversion.site))


def _order(site: Site | None) -> tuple[str, int, int]:
    return (site.filename, site.lineno, site.col or 0) if site else ("", 0, 0)


def _json(groups: list[tuple[Violation, int]], conversions: int) -> dict[str, Any]:
    return {
        "version": JSON_VERSION,
        "conversions": conversions,
        "violations": [
            {
                "count": count,
                "kind": violation.kind,
                "op": violation.op,
                "call": violation.call,
                "argument": violation.argument,
                "role": violation.role,
                "allowed": violation.allowed,
                "module": violation.module,
                "site": _json_site(violation.site),
                "conversion": _json_conversion(violation.conversion),
                "help": list(violation.help),
                "message": render(violation),
            }
            for violation, count in groups
        ],
    }


def _json_site(site: Site | None) -> dict[str, Any] | None:
    if site is None:
        return None
    names = ("filename", "lineno", "end_lineno", "col", "end_col", "function", "line")
    return {name: getattr(site, name) for name in names} | {"caller": _json_site(site.caller)}


def _json_conversion(conversion: Conversion) -> dict[str, Any]:
    return {
        "call": conversion.call,
        "arguments": conversion.arguments,
        "copied": conversion.copied,
        "source": _json_meta(conversion.source),
        "result": _json_meta(conversion.result),
        "module": conversion.module,
        "site": _json_site(conversion.site),
    }


def _json_meta(meta: TensorMeta) -> dict[str, Any]:
    return {"dtype": str(meta.dtype), "device": str(meta.device), "shape": list(meta.shape)}


_RULE = "to-mutation"
_SUMMARY = "In-place write to a tensor that has been through to()"


def _sarif(groups: list[tuple[Violation, int]]) -> dict[str, Any]:
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "dispatch_guard",
                        "rules": [{"id": _RULE, "shortDescription": {"text": _SUMMARY}}],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [_sarif_result(violation, count) for violation, count in groups],
            }
        ],
    }


def _sarif_result(violation: Violation, count: int) -> dict[str, Any]:
    conversion = violation.conversion
    site = violation.site or conversion.site
    result: dict[str, Any] = {
        "ruleId": _RULE,
        "level": "error",
        "message": {"text": render(violation)},
        "occurrenceCount": count,
        "locations": [_sarif_location(site, "written in place here")] if site else [],
        "relatedLocations": [_sarif_location(conversion.site, _converted(conversion), 1)] if conversion.site else [],
    }
    return result


def _sarif_location(site: Site, text: str, number: int | None = None) -> dict[str, Any]:
    region: dict[str, Any] = {"startLine": site.lineno}
    if site.end_lineno is not None:
        region["endLine"] = site.end_lineno
    if site.col is not None and site.end_col is not None:
        region |= {"startColumn": site.col + 1, "endColumn": site.end_col + 1}
    uri = Path(site.filename).as_uri() if Path(site.filename).is_absolute() else quote(site.filename)
    location: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": {"uri": uri}, "region": region},
        "message": {"text": text},
    }
    return location if number is None else {"id": number, **location}


def _github(violation: Violation, count: int) -> str:
    """One workflow command; properties and data are escaped as actions/toolkit's core/src/command.ts does."""
    site = violation.site or violation.conversion.site
    place = [f"file={_property(_relative(site.filename))}", f"line={site.lineno}"] if site else []
    if site is not None and site.end_lineno is not None:
        place.append(f"endLine={site.end_lineno}")
    title = headline(violation) + (f" ({count} times)" if count > 1 else "")
    return f"::error {','.join([*place, f'title={_property(title)}'])}::{_data(render(violation))}"


def _relative(filename: str) -> str:
    """``filename`` from the working directory, where it is in there: GitHub looks for it in the repository."""
    return filename.removeprefix(os.getcwd() + os.sep)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
