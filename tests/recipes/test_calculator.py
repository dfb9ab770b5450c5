import asyncio
from itertools import islice

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from recipes.calculator_policy import TASKS
from recipes.run.show_trajectory import most_eventful, show_trajectory
from recipes.tasks.calculator import CALL, Calculator, calculate, now_and_then, reply
from recipes.tasks.reasoning import ReasoningTasks
from recipes.tiny_model import _supervised_batch, character_tokenizer
from rzero.collectors import Prompt
from rzero.collectors.engine import Completion, packed_rows, row_digests
from rzero.collectors.pack_completions import group_fields, pack_groups
from tests.collectors.conftest import request

EXPRESSIONS = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", " - ", "*"]), inner).map("".join),
        inner.map("({})".format),
        inner.map("-{}".format),
        inner.map("+{}".format),
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_values_are_those_of_the_language(expression):
    # Only digits, + - * and parentheses stand in it, so that the language itself may evaluate it here.
    assert calculate(expression) == eval(expression)


REFUSED = ["", "2 +", "07", "2**9", "1/2", "7//2", "()", "(1, 2)", "2(3)", "True", "1e3", "0x1f", "x"]
REFUSED += ["__import__('os')", "1if 2else 3", "\N{FULLWIDTH DIGIT ONE}", "1\n2", "\0", "9" * 5000]
REFUSED += ["(" * 400 + "1" + ")" * 400, "-" * 100_000 + "1"]


@pytest.mark.parametrize("expression", REFUSED)
def test_all_else_is_refused(expression):
    with pytest.raises(ValueError):
        calculate(expression)


def test_the_tool_answers_on_a_line_of_its_own():
    assert reply("58 - 17 + 90=") == "\n131\n"
    assert reply("58 -=") == "\n?\n"
    assert reply("=") == "\n?\n"


def test_a_trajectory_in_the_calculator():
    tokenizer, tasks = character_tokenizer(), ReasoningTasks(TASKS, seed=0, held_out_size=8)
    problem = next(tasks.stream(0))
    call = problem.entry["metadata"]["expression"] + CALL

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    async def play():
        environment = Calculator(tokenizer, tasks)
        prompt = Prompt(prompt_id=0, token_ids=(1, 2), problem=problem)
        assert await environment.reset(prompt, seed=0) == (1, 2)
        yield await environment.step(encode(call))
        yield await environment.step([*encode(problem.answer), tokenizer.eos_token_id])
        yield await environment.step([*encode("no"), tokenizer.eos_token_id])
        await environment.close()

    async def steps():
        return [step async for step in play()]

    value, right, wrong = asyncio.run(steps())
    assert tokenizer.decode(value.observation) == f"\n{problem.answer}\n"
    assert (value.reward, value.terminated, value.truncated) == (0.0, False, False)
    assert (right.reward, right.terminated, len(right.observation)) == (1.0, True, 0)
    assert wrong.reward < 1.0 and wrong.terminated


def test_what_the_tool_says_is_not_learned_in_the_warm_up():
    tokenizer, tasks = character_tokenizer(), ReasoningTasks(TASKS, seed=0, held_out_size=8)
    problems = list(islice(tasks.stream(0), 8))
    batch = _supervised_batch(tokenizer, problems, now_and_then)
    for problem, ids, labels in zip(problems, batch["input_ids"], batch["labels"], strict=True):
        call = problem.entry["metadata"]["expression"] + CALL if problem.prompt_id % 2 == 0 else ""
        said = reply(call) if call else ""
        learned = tokenizer.decode(labels[labels >= 0], skip_special_tokens=True)
        assert learned == call + problem.answer
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert text == f"{problem.question}\n{call}{said}{problem.answer}"
        assert labels[labels >= 0][-1] == tokenizer.eos_token_id


def completion(uid, tokens, versions, tokenizer):
    response = torch.tensor(tokens, dtype=torch.int32)
    version = torch.tensor(versions, dtype=torch.int32)
    log_probs = torch.where(version >= 0, -0.5, torch.nan)
    made = request(uid, prompt=tuple(tokenizer.encode("1+1\n", add_special_tokens=False)))
    return Completion(
        request=made,
        response=response,
        behavior_log_probs=log_probs,
        policy_version=version,
        finish_code=0,
        context_id=0,
        t_submit_ns=1,
        t_first_ns=1,
        t_done_ns=1,
        digest=row_digests(packed_rows([made.prompt], [len(tokens)], response, log_probs, version))[0],
    )


def test_a_trajectory_is_shown_with_masks_and_versions():
    tokenizer = character_tokenizer()
    played = [*tokenizer.encode("1+1=\n2\n2", add_special_tokens=False), tokenizer.eos_token_id]
    rows = [
        completion(0, played[:1], [6], tokenizer),
        completion(1, played, [3, 3, 3, 4, -1, -1, -1, 5, 5], tokenizer),
        completion(2, played, [3, 4, 5, 6, -1, -1, -1, 7, 8], tokenizer),
    ]
    batch = pack_groups([group_fields(rows, [1.0, 1.0, 0.0])])
    assert most_eventful(batch) == 1
    assert show_trajectory(batch, 1, tokenizer).splitlines() == [
        "  reward 1",
        "  version  mask   log-prob  text",
        r"        -  False         -  '1+1\n'",
        "        3  True     -1.500  '1+1'",
        "        4  True     -0.500  '='",
        r"        -  False         -  '\n2\n'",
        "        5  True     -1.000  '2<eos>'",
    ]
