"""A checkup as one page, what is wrong first: nothing in it is loaded, and nothing runs."""

from markupsafe import Markup

from gradweave._src.doctor import Diagnosis
from gradweave._src.doctor.price import sentences
from gradweave._src.doctor.tables import matrices, rank_columns
from gradweave._src.report.inline import asset, policy_hash, template


def make_checkup_page(diagnosis: Diagnosis) -> str:
    style = f"{asset('page.css')}\n{asset('checkup.css')}"
    columns = rank_columns(diagnosis.checkup)
    return template("checkup.html").render(
        summary=diagnosis.summary,
        headline=_headline(len(diagnosis.findings)),
        findings=diagnosis.findings,
        price=sentences(diagnosis.price) if diagnosis.price else (),
        matrices=matrices(diagnosis.checkup),
        columns=list(columns),
        rows=list(zip(*columns.values(), strict=True)),
        style=Markup(style),  # noqa: S704 our own files
        style_hash=policy_hash(style),
    )


def _headline(findings: int) -> str:
    if not findings:
        return "Nothing found: these hosts look ready for training."
    return f"{findings} thing{'s' * (findings > 1)} to look at before training."
