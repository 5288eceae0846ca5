import pytest

pytest_plugins = ["pytester"]

TESTS = """
    import pathlib
    import pytest

    RUNS = pathlib.Path("runs")

    @pytest.fixture
    def namespace(tmp_path):
        return tmp_path.name

    @pytest.fixture(autouse=True)
    def run(request, namespace):
        with RUNS.open("a") as file:
            file.write(f"{request.node.name} {namespace}\\n")
        return RUNS.read_text().count(f"{request.node.name} ")

    def test_flaky(run):
        assert run == 2, "the API server was away"

    def test_broken(run):
        assert run == 0, f"broken at try {run}"

    def test_sound():
        pass
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def go(*arguments: str) -> pytest.RunResult:
        pytester.makepyfile(TESTS)
        return pytester.runpytest_inprocess("-p", "runner.second_try", "-p", "no:cacheprovider", *arguments)

    return go


def test_a_test_that_passes_at_the_second_try_lets_the_run_pass_and_is_printed(run) -> None:
    result = run("-k", "flaky or sound")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=2)
    heading, name, reason = "=* FLAKY =*", "_* *::test_flaky: failed, at the second try passed _*", "*the API server*"
    result.stdout.fnmatch_lines([heading, name, reason])
    assert result.outlines[-1].strip("= ").startswith("2 passed, 1 deselected, 1 retried")


def test_a_test_that_fails_twice_fails_and_both_failures_are_printed(run) -> None:
    result = run("-k", "broken or sound")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["=* FAILURES =*", "*broken at try 2*", "=* FLAKY =*", "*broken at try 1*"])


def test_second_tries_come_last_with_fixtures_of_their_own(run, pytester: pytest.Pytester) -> None:
    run()
    names, namespaces = zip(*(line.split() for line in (pytester.path / "runs").read_text().splitlines()), strict=True)
    assert names == ("test_flaky", "test_broken", "test_sound", "test_flaky", "test_broken")
    assert len(set(namespaces)) == 5


def test_a_run_without_failures_prints_no_heading(run) -> None:
    result = run("-k", "sound")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.no_fnmatch_line("*FLAKY*")


def test_a_second_try_that_is_skipped_does_not_excuse_the_failure(run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_gone="""
        import pathlib
        import pytest

        def test_gone():
            if pathlib.Path("gone").exists():
                pytest.skip("there is no cluster any more")
            pathlib.Path("gone").touch()
            raise AssertionError("the cluster broke")
        """
    )
    result = run("-k", "gone")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*the cluster broke*", "=* FLAKY =*", "*test_gone: failed, at the second try failed*"])


def test_a_failure_of_a_fixture_is_tried_again_too(run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_setup="""
        import pathlib
        import pytest

        @pytest.fixture(scope="module")
        def installed():
            if not pathlib.Path("installed").exists():
                pathlib.Path("installed").touch()
                raise OSError("no route to the registry")

        def test_installed(installed):
            pass
        """
    )
    result = run("-k", "installed")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["=* FLAKY =*", "*no route to the registry*"])
