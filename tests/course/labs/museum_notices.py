"""Writes `course/lab22_bug_museum/notices.json`: which check notices which fault. A minute or two.

python -m tests.course.labs.museum_notices
"""

import json

from course.lab22_bug_museum import notices
from course.lab22_bug_museum.exhibit import Exhibit
from course.lab22_bug_museum.museum import EXHIBITS
from tests.engine.comm.nccl_like import make_nccl_like_strategy


def breaks_nccls_rules(exhibit: Exhibit) -> bool:
    return notices.breaks_rules(exhibit, make_nccl_like_strategy)


def found(names) -> dict[str, notices.Noticed]:
    return {name: notices.noticed(EXHIBITS[name], breaks_nccls_rules) for name in names}


if __name__ == "__main__":
    table = {name: dict(sorted(its.items())) for name, its in found(EXHIBITS).items()}
    notices.FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(notices.notices("training", table), notices.notices("serving", table), sep="\n\n")
    print("noticed by none:", ", ".join(notices.unnoticed(table)) or "none")
