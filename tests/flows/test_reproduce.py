"""What `flows.reproduce` does before it builds; tests/test_smoke.py builds."""

from flows.reproduce import main


def test_engine_is_looked_up_where_the_option_says(tmp_path, capsys) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert main(["0123456789abcdef", "--tracking-uri", uri]) == 1
    assert f"MLflow at {uri} has no engine with sha256 0123456789abcdef" in capsys.readouterr().err
