"""Write the facts of the surroundings that shape outputs, by section of params.yaml, to artifacts/environment.json.

``python -m flows.environment`` is a stage of dvc.yaml that runs each time. The other stages depend on their section
of the file, so ``dvc repro`` honours the facts that are in the keys. It also stores the outputs of which DVC's cache
has no intact copy, before DVC deletes what it makes anew, and removes damaged ones. Before all that it checks the
values of params.yaml that DVC puts into commands, which nobody checked where the file was edited.
"""

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flows.pipeline import RecordedStages, run_pipeline
from flows.templates import check_templates
from tasks.core.config import find_section, read_params, typed_config
from tasks.core.environment import ENVIRONMENT_FILE, Facts
from tasks.core.errors import EnginewrightError
from tasks.core.execute import (
    explained_full_disk,
    find_facts,
    keep_outputs,
    load_stage,
    output_folder,
    recorded_facts,
    remove_damaged,
)
from tasks.core.reports import write_json
from tasks.core.store import cache_folder

_CHECKED = "checked"
"""The entry, always true, by which stages without facts depend on this one, so that DVC starts none before it."""


def write_environment(params: Mapping[str, Any], elsewhere: Collection[str] = ()) -> None:
    """Write the facts of every section; those of outputs that were made `elsewhere` (addresses) are as recorded."""
    plan = RecordedStages()
    run_pipeline(plan, params)
    sections: dict[str, Facts | None] = {}
    for address in plan.calls:
        name, section = find_section(params, address)
        if name in sections and (sections[name] is None or sections[name]):
            continue
        if address in elsewhere:
            sections[name] = recorded_facts(output_folder(address))
        else:
            stage, config_class = load_stage(address)
            config = typed_config(config_class, section, name)
            sections[name] = find_facts(stage, config, output_folder(address))
    ENVIRONMENT_FILE.parent.mkdir(exist_ok=True)
    facts_of = _nested({name: facts for name, facts in sections.items() if facts is not None})
    write_json(ENVIRONMENT_FILE, {_CHECKED: True, **facts_of})


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
    """Check params.yaml, write the file, store the outputs, remove the damaged ones, and return the exit code."""
    try:
        with explained_full_disk(cache_folder()):
            params = read_params()
            check_templates(params, Path("dvc.yaml"))
            write_environment(params)
            keep_outputs()
            remove_damaged()
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
