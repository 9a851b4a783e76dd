"""Records to text."""

from __future__ import annotations

from .violations import Conversion, Site, Violation


def render(violation: Violation) -> str:
    """The message of a :class:`~dispatch_guard.ToMutationError`."""
    conversion = violation.conversion
    lines = [
        f"in-place {violation.op} on the {violation.role} of {conversion.call}",
        "",
        *_place(conversion.site, conversion.module, _converted(conversion)),
        *_place(violation.site, violation.module, _written(violation)),
        "",
        *_why(violation),
        "",
        *_help(violation),
    ]
    return "\n".join(lines)


def _place(site: Site | None, module: str, label: str) -> list[str]:
    if site is None:
        return [f"  {label}"]
    where = f"  {site.filename}:{site.lineno}, in {site.function}" + (f" ({module})" if module else "")
    text = site.line.strip()
    if not text:
        return [where, f"      {label} (source not available)"]
    start = site.col - (len(site.line) - len(site.line.lstrip())) if site.col is not None else 0
    one_line = site.end_lineno == site.lineno and site.end_col is not None and site.col is not None
    width = site.end_col - site.col if one_line and site.end_col and site.col is not None else len(text) - start
    return [where, f"      {text}", f"      {' ' * start}{'^' * max(1, width)} {label}"]


def _converted(conversion: Conversion) -> str:
    was = f"{str(conversion.source.dtype).removeprefix('torch.')} on {conversion.source.device}"
    if not conversion.copied:
        return f"converted here; the source was already {was}, so the result is the source itself (an alias)"
    now = f"{str(conversion.result.dtype).removeprefix('torch.')} on {conversion.result.device}"
    return f"converted here, from {was} to {now}, so the result is a copy"


def _written(violation: Violation) -> str:
    if violation.site is None:
        return "written in place since, where no mode could see it (another thread, or modes turned off)"
    return "written in place here"


def _why(violation: Violation) -> list[str]:
    other = "source" if violation.role == "result" else "result"
    if violation.conversion.copied:
        return [
            f"  Here the write leaves the {other} as it is. On a device or dtype where to() has nothing to do, it",
            "  would change it: the exported program can keep only one of the two.",
        ]
    return [
        f"  Here the write also changes the {other}. On a device or dtype where to() must copy, it would not: the",
        "  exported program can keep only one of the two.",
    ]


def _help(violation: Violation) -> list[str]:
    return [
        "  help: write out of place, or take a copy of your own: to(..., copy=True)",
        '  to allow this write: with dispatch_guard.allow_mutation("why it is safe")',
    ]
