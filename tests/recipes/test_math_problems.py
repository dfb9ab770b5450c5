import json
import threading
from itertools import islice

import pytest

from recipes.errors import RecipeError
from recipes.tasks import math_verifier
from recipes.tasks.math_problems import MathTasks, read_problems
from recipes.tasks.math_verifier import MathVerifier


def published(question, answer, **changes):
    """A row as `sail/Sanity-Test-R1D-1.5B` has them."""
    row = {
        "data_source": "math",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": 0},
    }
    return row | changes


ROWS = [published(f"What is {n} + {n}?", str(2 * n)) for n in range(7)]


@pytest.fixture
def json_lines(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    return path


@pytest.fixture
def parquet(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "train.parquet"
    parquet.write_table(arrow.Table.from_pylist(ROWS), path)
    return path


@pytest.fixture(scope="module")
def verifier():
    verifier = MathVerifier()
    yield verifier
    verifier.close()


@pytest.mark.parametrize("kind", ["json_lines", "parquet"])
def test_the_published_format_is_read(kind, request):
    problems = read_problems(request.getfixturevalue(kind))
    assert [(p.prompt_id, p.question, p.answer) for p in problems] == [
        (n, f"What is {n} + {n}?", str(2 * n)) for n in range(7)
    ]


@pytest.mark.parametrize(
    ("row", "got"),
    [
        ({"problem": "1 + 1?", "answer": "2"}, "KeyError: 'prompt'"),
        (published("1 + 1?", "2", prompt="1 + 1?"), "ValueError: too many values"),
        (published("1 + 1?", "2", prompt=[{"role": "system", "content": ""}]), "a message of system"),
        (published("1 + 1?", "2", reward_model={"style": "rule"}), "KeyError: 'ground_truth'"),
        (published("1 + 1?", 2), "not both text"),
        ([], "TypeError"),
    ],
)
def test_a_row_that_is_otherwise_is_named(tmp_path, row, got):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(RecipeError, match="row 1 must have prompt") as refused:
        read_problems(path)
    assert got in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "must be .jsonl or .parquet, got"),
        ("a.jsonl", "", "must hold problems, got none"),
        ("a.jsonl", "{", "must be a file of problems"),
        ("a.parquet", "no parquet", "must be a file of problems"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match=message):
        read_problems(tmp_path / name)
    with pytest.raises(RecipeError, match="No such file"):
        read_problems(tmp_path / "missing.jsonl")


def test_every_pass_has_every_problem_once_in_another_order(json_lines):
    tasks = MathTasks(json_lines, None, seed=3, held_out_size=2)
    assert [p.question for p in tasks.held_out] == ["What is 5 + 5?", "What is 6 + 6?"]
    stream = list(islice(tasks.stream(0), 15))
    assert [p.prompt_id for p in stream] == list(range(15))
    passes = [tuple(p.question for p in stream[start : start + 5]) for start in (0, 5, 10)]
    assert {frozenset(one) for one in passes} == {frozenset(f"What is {n} + {n}?" for n in range(5))}
    assert len(set(passes)) > 1
    assert list(islice(tasks.stream(7), 8)) == stream[7:]
    assert [tasks.problem(index) for index in range(15)] == stream
    assert list(islice(MathTasks(json_lines, None, seed=4, held_out_size=2).stream(0), 15)) != stream


def test_held_out_problems_of_a_file_of_their_own(json_lines, tmp_path):
    held_out = tmp_path / "test.jsonl"
    held_out.write_text("\n".join(json.dumps(published(f"AIME {n}", str(n))) for n in range(4)))
    tasks = MathTasks(json_lines, held_out, seed=0, held_out_size=3)
    assert [p.question for p in tasks.held_out] == ["AIME 0", "AIME 1", "AIME 2"]
    assert len({p.question for p in islice(tasks.stream(0), 7)}) == 7


def test_something_must_be_left_to_train_on(json_lines):
    with pytest.raises(RecipeError, match="--held-out must leave problems to train on, got 7 of 7"):
        MathTasks(json_lines, None, seed=0, held_out_size=7)


@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        (r"<think>Hm, \boxed{3}?</think>It is \boxed{\frac12}.", "0.5", 1.0),
        (r"\boxed{-q + p}", "p - q", 1.0),
        (r"\boxed{(3, 4)}", "(3,4)", 1.0),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1.0),
        (r"\boxed{3}, no: \boxed{4}", "4", 1.0),  # the last one counts
        (r"\boxed{4}, no: \boxed{3}", "4", 0.0),
        (r"<think>\boxed{4}</think>It is four.", "4", 0.0),  # a thought is no answer
        ("The answer is $4$.", "4", 0.0),  # nor is what is not boxed
        (r"\boxed{", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_answers(verifier, response, reference, score):
    assert verifier.score(response, reference) == score


def test_it_answers_from_any_thread(verifier):
    """Rewards are computed outside of the main thread, where math-verify alone would refuse."""
    scores = []
    thread = threading.Thread(target=lambda: scores.append(verifier.score(r"\boxed{4}", "4")))
    thread.start()
    thread.join()
    assert scores == [1.0]


def test_a_comparison_without_end_is_wrong_and_counted(monkeypatch):
    monkeypatch.setattr(math_verifier, "DEADLINE", 0.01)  # less than the start of its process
    verifier = MathVerifier()
    assert verifier.score(r"\boxed{4}", "4") == 0.0
    assert verifier.timeouts == 1
    monkeypatch.setattr(math_verifier, "DEADLINE", 30.0)
    assert verifier.score(r"\boxed{4}", "4") == 1.0
    verifier.close()


def test_math_verify_must_be_there(monkeypatch, json_lines):
    monkeypatch.setattr(math_verifier.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"pip install 'rzero\[math\]'"):
        MathTasks(json_lines, None, seed=0, held_out_size=1)
