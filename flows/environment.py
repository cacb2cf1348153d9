"""Write the facts of the surroundings that shape outputs, by section of params.yaml, to artifacts/environment.json.

``python -m flows.environment`` is a stage of dvc.yaml that runs each time. The other stages depend on their section
of the file, so ``dvc repro`` honours the facts that are in the keys. It first checks the values of params.yaml that
DVC puts into commands, which nobody checked where the file was edited. It also stores outputs that DVC's cache lacks,
before DVC deletes what it makes anew, and removes those that are damaged or no longer hold.
"""

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flows.pipeline import RecordedStages, run_pipeline
from flows.templates import check_templates
from tasks.core.config import find_section, read_params
from tasks.core.environment import ENVIRONMENT_FILE, Facts
from tasks.core.errors import EnginewrightError
from tasks.core.execute import (
    explained_full_disk,
    find_facts,
    keep_outputs,
    output_folder,
    recorded_facts,
    remove_damaged,
    remove_obsolete,
    resolve,
)
from tasks.core.reports import write_json
from tasks.core.store import cache_folder

_CHECKED = "checked"
"""The entry, always true, by which stages without facts depend on this one, so that DVC starts none before it."""


def write_environment(params: Mapping[str, Any], elsewhere: Collection[str] = ()) -> None:
    """Write the facts of every section; those of outputs that were made `elsewhere` (addresses) are as recorded."""
    sections: dict[str, Facts | None] = {}
    for address in _addresses(params):
        name, _ = find_section(params, address)
        if name in sections and (sections[name] is None or sections[name]):
            continue
        if address in elsewhere:
            sections[name] = recorded_facts(output_folder(address))
        else:
            stage, config = resolve(address, params)
            sections[name] = find_facts(stage, config, output_folder(address))
    ENVIRONMENT_FILE.parent.mkdir(exist_ok=True)
    facts_of = _nested({name: facts for name, facts in sections.items() if facts is not None})
    write_json(ENVIRONMENT_FILE, {_CHECKED: True, **facts_of})


def _addresses(params: Mapping[str, Any]) -> Collection[str]:
    plan = RecordedStages()
    run_pipeline(plan, params)
    return plan.calls


def _nested(sections: Mapping[str, Facts]) -> dict[str, Any]:
    """Return the facts of dotted names as params.yaml nests its sections."""
    content: dict[str, Any] = {}
    for name, facts in sections.items():
        *parents, last = name.split(".")
        place = content
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = dict(facts)
    return content


def main() -> int:
    """Check params.yaml, write the file, store outputs, remove those that DVC must not keep; return the exit code."""
    try:
        with explained_full_disk(cache_folder()):
            params = read_params()
            check_templates(params, Path("dvc.yaml"))
            write_environment(params)
            keep_outputs()
            remove_damaged()
            for address in _addresses(params):
                remove_obsolete(address, params)
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
