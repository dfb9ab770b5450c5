from itertools import islice

import pytest

from recipes.tasks.reasoning import ReasoningTasks


def test_held_out_problems_are_never_trained_on():
    tasks = ReasoningTasks(["basic_arithmetic", "chain_sum"], seed=0, held_out_size=128)
    held_out = {problem.question for problem in tasks.held_out}
    assert len(held_out) == 128
    trained = {problem.question for problem in islice(tasks.stream(0), 3000)}
    assert not trained & held_out
    assert len(trained) > 1000


def test_the_stream_goes_on_where_it_stopped():
    tasks = ReasoningTasks(["chain_sum"], seed=5, held_out_size=16)
    first = list(islice(tasks.stream(0), 50))
    again = list(islice(tasks.stream(first[20].prompt_id), 30))
    assert [p.prompt_id for p in again] == [p.prompt_id for p in first[20:50]]
    assert [p.question for p in again] == [p.question for p in first[20:50]]


def test_seeds_change_training_and_not_what_is_held_out():
    one, other = (ReasoningTasks(["chain_sum"], seed=seed, held_out_size=16) for seed in (0, 1))
    assert [p.question for p in one.held_out] == [p.question for p in other.held_out]
    questions = [[p.question for p in islice(tasks.stream(0), 20)] for tasks in (one, other)]
    assert questions[0] != questions[1]


def test_the_tasks_own_verifier_scores():
    tasks = ReasoningTasks(["basic_arithmetic", "spell_backward"], seed=0, held_out_size=16)
    for problem in islice(tasks.stream(0), 40):
        assert tasks.score(problem, f" {problem.answer}\n") == 1.0
        assert tasks.score(problem, "no") < 1.0


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["no_such_task"], "must name data sets of reasoning-gym and their options, got"),
        (["chain_sum:no_such_option=3"], "no_such_option"),
        (["chain_sum:min_terms"], "specs must be name:key=value,key=value, got 'chain_sum:min_terms'"),
        (["basic_arithmetic:max_terms=2,max_digits=1,operators=['+']"], "must leave problems to train on"),
    ],
)
def test_refusals(specs, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        ReasoningTasks(specs, seed=0, held_out_size=256)
