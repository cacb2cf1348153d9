"""What a run is to hold has a digest, and names its commit."""

from tasks.core.tracking.records import UNCOMMITTED, git_commit


def test_changed_bytes_of_an_artifact_are_other_content(candidates) -> None:
    before = candidates[0].content_digest()
    candidates[0].artifacts[0][1].write_bytes(b"other weights")
    assert candidates[0].content_digest() != before


def test_the_code_says_the_commit_of_its_checkout() -> None:
    commit = git_commit().removesuffix(UNCOMMITTED)
    assert commit == "unknown" or (len(commit) == 40 and int(commit, 16) >= 0)
