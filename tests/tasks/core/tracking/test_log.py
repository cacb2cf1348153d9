"""MLflow gets each candidate once, against a real SQLite store."""

import dataclasses
from pathlib import Path

import yaml

from tasks.core.tracking.config import TrackingConfig
from tasks.core.tracking.log import log_pipeline
from tasks.core.tracking.records import RunRecord, git_commit
from tests.tasks.core.tracking.conftest import DATA, client_of, record, runs_of


def models_of(config: TrackingConfig):
    client = client_of(config)
    experiment = client.get_experiment_by_name(config.experiment)
    return {model.name: model for model in client.search_logged_models([experiment.experiment_id])}


def test_each_candidate_is_a_child_run_of_the_pipeline(config, pipeline, candidates) -> None:
    tracked = log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})

    assert tracked.num_runs_added == 3
    runs = {run.info.run_name: run for run in runs_of(config)}
    assert set(runs) == {"pipeline", "a", "b"}
    assert runs["b"].data.tags["mlflow.parentRunId"] == tracked.parent_run_id
    assert runs["b"].data.metrics == {"latency_ms_p50": 1.0, "miou": 0.5}
    assert runs["b"].data.tags["git_commit"] == git_commit()
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    client = client_of(config)
    assert [file.path for file in client.list_artifacts(runs["a"].info.run_id, "engine")] == [
        "engine/a.engine"
    ]
    of_pipeline = [file.path for file in client.list_artifacts(tracked.parent_run_id)]
    assert of_pipeline == ["environment.json", "params.yaml", "report.html"]


def test_run_of_the_pipeline_has_the_configuration_as_parameters(config, pipeline, candidates) -> None:
    params = yaml.safe_dump(
        {
            "distill": {"trainer": {"max_epochs": 7, "learning_rate": 0.1}},
            "quantize_ptq": {"calibrators": ["minmax", "entropy"], "name": "x" * 7000},
            "engines": {"a": {"variant": "b"}},
            **{f"stage{number}": {"salt": number} for number in range(150)},
        }
    )
    tracked = log_pipeline(
        config, pipeline=dataclasses.replace(pipeline, params=params), candidates=candidates, picks={}
    )
    logged = client_of(config).get_run(tracked.parent_run_id).data.params
    assert logged["distill.trainer.max_epochs"] == "7" and logged["distill.trainer.learning_rate"] == "0.1"
    assert logged["quantize_ptq.calibrators"] == '["minmax", "entropy"]'
    assert len(logged["quantize_ptq.name"]) == 6000 and logged["stage149.salt"] == "149"
    assert len(logged) == 154


def test_every_metric_has_one_point(config, pipeline, candidates) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})

    client = client_of(config)
    for run in runs_of(config):
        for name in run.data.metrics:
            assert len(client.get_metric_history(run.info.run_id, name)) == 1


def test_the_model_table_sorts_by_latency(config, pipeline, candidates) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})

    client = client_of(config)
    experiment = client.get_experiment_by_name(config.experiment)
    models = client.search_logged_models(
        [experiment.experiment_id],
        order_by=[{"field_name": "metrics.latency_ms_p50", "ascending": True}],
    )
    assert [model.name for model in models] == ["b", "a"]


def test_every_run_names_the_data_set_with_the_digest_of_dvc(config, pipeline, candidates) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})

    for run in runs_of(config):
        [found] = run.inputs.dataset_inputs
        assert (found.dataset.name, found.dataset.digest) == (DATA.name, DATA.digest)
        assert DATA.path in found.dataset.source


def test_each_engine_is_a_ready_model_that_its_run_puts_out(config, pipeline, candidates) -> None:
    for _ in range(2):
        log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})

    runs, models = {run.info.run_name: run for run in runs_of(config)}, models_of(config)
    assert set(models) == {"a", "b"}
    for name, model in models.items():
        assert [output.model_id for output in runs[name].outputs.model_outputs] == [model.model_id]
        assert (model.status, model.model_type, model.source_run_id) == (
            "READY",
            "engine",
            runs[name].info.run_id,
        )
        assert {metric.key: metric.value for metric in model.metrics} == runs[name].data.metrics
        assert model.params == {"variant": name, "target": "cpu"} and model.tags["reason"] == "fast enough"


def test_what_was_not_built_is_a_run_and_no_model(config, pipeline, candidates) -> None:
    skipped = dataclasses.replace(candidates[0], metrics={})
    log_pipeline(config, pipeline=pipeline, candidates=[skipped, candidates[1]], picks={})
    assert set(models_of(config)) == {"b"} and len(runs_of(config)) == 3


def test_the_same_content_adds_no_run_and_no_version(config, pipeline, candidates) -> None:
    picks = {"enginewright-cpu": "b"}
    first = log_pipeline(config, pipeline=pipeline, candidates=candidates, picks=picks)
    second = log_pipeline(config, pipeline=pipeline, candidates=candidates, picks=picks)

    assert (first.num_runs_added, first.num_versions_added) == (3, 1)
    assert (second.num_runs_added, second.num_versions_added) == (0, 0)
    assert second.parent_run_id == first.parent_run_id
    assert len(runs_of(config)) == 3


def test_other_content_is_another_pipeline_run(config, pipeline, candidates, tmp_path) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})
    changed = [candidates[0], record(tmp_path, "b", 0.5)]
    tracked = log_pipeline(config, pipeline=pipeline, candidates=changed, picks={})

    assert tracked.num_runs_added == 3
    assert len(runs_of(config)) == 6


def test_a_killed_logging_is_continued(config, pipeline, candidates) -> None:
    first = log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})
    client = client_of(config)
    half_done = next(run for run in runs_of(config) if run.info.run_name == "b")
    client.update_run(half_done.info.run_id, status="RUNNING")
    client.update_run(first.parent_run_id, status="RUNNING")
    models_before = list(models_of(config).values())

    second = log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})

    assert second.parent_run_id == first.parent_run_id
    assert second.num_runs_added == 1
    names = sorted(run.info.run_name for run in runs_of(config))
    assert names == ["a", "b", "pipeline"]
    [first_try] = [model for model in models_before if model.name == "b"]
    assert first_try.model_id not in {model.model_id for model in models_of(config).values()}
    assert set(models_of(config)) == {"a", "b"}
    assert {run.info.status for run in runs_of(config)} == {"FINISHED"}


def test_the_pick_is_a_version_that_hands_out_the_engine(config, pipeline, candidates, tmp_path) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={"enginewright-cpu": "b"})

    client = client_of(config)
    version = client.get_model_version_by_alias("enginewright-cpu", "candidate")
    assert version.tags["variant"] == "b"
    assert version.description == "fast enough"
    folder = Path(version.source.removeprefix("file://"))
    assert (folder / "b.engine").read_bytes() == b"b"


def test_the_alias_moves_to_a_new_pick_and_back_without_a_third_version(config, pipeline, candidates) -> None:
    for name in ("a", "b", "a"):
        log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={"enginewright-cpu": name})
        version = client_of(config).get_model_version_by_alias("enginewright-cpu", "candidate")
        assert version.tags["variant"] == name
    assert len(client_of(config).search_model_versions("name = 'enginewright-cpu'")) == 2


def test_a_target_without_a_pick_loses_the_alias(config, pipeline, candidates) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={"enginewright-cpu": "a"})
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={"enginewright-cpu": None})

    model = client_of(config).get_registered_model("enginewright-cpu")
    assert "candidate" not in model.aliases


def test_no_model_is_registered_for_a_target_that_never_had_a_pick(config, pipeline, candidates) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={"enginewright-cpu": None})
    assert list(client_of(config).search_registered_models()) == []


def test_a_deleted_experiment_is_used_again(config, pipeline, candidates) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})
    client = client_of(config)
    client.delete_experiment(client.get_experiment_by_name(config.experiment).experiment_id)

    assert log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={}).parent_run_id


def note_of(config, run_id: str) -> str:
    return client_of(config).get_run(run_id).data.tags["mlflow.note.content"]


def test_run_of_a_pipeline_leads_to_its_trainings_and_says_how_to_go_on(config, pipeline, candidates) -> None:
    made = dataclasses.replace(
        pipeline, trainings={"train.teacher": "abc", "distill": "def"}, commit="c" * 40
    )
    tracked = log_pipeline(config, pipeline=made, candidates=candidates, picks={})

    run, note = client_of(config).get_run(tracked.parent_run_id), note_of(config, tracked.parent_run_id)
    assert (run.data.tags["key_train.teacher"], run.data.tags["key_distill"]) == ("abc", "def")
    assert "c" * 40 in note and "flows.reproduce <engine_sha256>" in note and "Changed since" not in note
    assert "train.teacher: ``tags.`key` = 'abc'``" in note
    client = client_of(config)
    training = client.create_run(tracked.experiment_id, tags={"key": "abc"})
    [found] = client.search_runs([tracked.experiment_id], "tags.`key` = 'abc'")
    assert found.info.run_id == training.info.run_id


def test_new_run_of_a_pipeline_says_what_changed_since_the_previous_one(
    config, pipeline, candidates, tmp_path
) -> None:
    def params(learning_rate: float) -> str:
        sections = {"train": {"learning_rate": learning_rate, "width": 1.0}, "engines": {"n": learning_rate}}
        return yaml.safe_dump(sections)

    def built(candidate: RunRecord, sha256: str) -> RunRecord:
        return dataclasses.replace(candidate, tags={**candidate.tags, "engine_sha256": sha256})

    a, b, c = *candidates, record(tmp_path, "c", 3.0)
    first = log_pipeline(
        config,
        pipeline=dataclasses.replace(
            pipeline, params=params(0.01), commit="old", trainings={"train": "abc", "distill": "d"}
        ),
        candidates=[built(a, "1"), built(b, "2"), built(c, "3")],
        picks={},
    )
    second = log_pipeline(
        config,
        pipeline=dataclasses.replace(
            pipeline,
            params=params(0.02),
            commit="new",
            trainings={"train": "xyz", "distill": "d"},
            data=dataclasses.replace(DATA, digest="other.dir"),
        ),
        candidates=[built(a, "1"), built(b, "4"), built(record(tmp_path, "e", 1.0), "5")],
        picks={},
    )
    changes = note_of(config, second.parent_run_id).partition("Changed since the run ")[2].splitlines()
    assert changes == [
        f"`{first.parent_run_id}`:",
        "- commit `old` -> `new`",
        f"- data digest `{DATA.digest}` -> `other.dir`",
        "- trainings with another key: `train`",
        "- engines with other bytes: `b`",
        "- new engines: `e`",
        "- engines no longer there: `c`",
        "- `train.learning_rate`: `0.01` -> `0.02`",
    ]


def test_pipeline_that_was_only_measured_again_says_so(config, pipeline, candidates, tmp_path) -> None:
    log_pipeline(config, pipeline=pipeline, candidates=candidates, picks={})
    again = [candidates[0], record(tmp_path, "b", 1.1)]
    tracked = log_pipeline(config, pipeline=pipeline, candidates=again, picks={})
    assert "only what was measured" in note_of(config, tracked.parent_run_id)


def test_description_of_many_changes_is_short_enough_for_mlflow(
    config, pipeline, candidates, tmp_path
) -> None:
    def with_params(value: str) -> RunRecord:
        sections = {f"stage_with_a_long_name_{number}": value * 100 for number in range(60)}
        return dataclasses.replace(pipeline, params=yaml.safe_dump(sections))

    log_pipeline(config, pipeline=with_params("a"), candidates=candidates, picks={})
    more = [*candidates, *(record(tmp_path, f"engine_{number}", 1.0) for number in range(12))]
    named = [
        dataclasses.replace(one, tags={**one.tags, "engine_sha256": str(number)})
        for number, one in enumerate(more)
    ]
    tracked = log_pipeline(config, pipeline=with_params("b"), candidates=named, picks={})
    note = note_of(config, tracked.parent_run_id)
    changes = note.partition("Changed since the run ")[2].splitlines()[1:]
    assert len(changes) == 20 and changes[-1] == "- and 42 other parameters" and len(note) < 5000
    assert changes[0].startswith("- new engines: `a`, `b`, `engine_0`") and changes[0].endswith(
        "and 4 others"
    )
