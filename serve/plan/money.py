"""What checks and verdicts cost: devices by the hour, a judge by the token. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from serve.plan.plan_file import JudgePricing

MILLION = 1e6
SECONDS_AN_HOUR = 3600


def per_million_checks(price_an_hour: float, devices: float, checks_per_second: float) -> float:
    """The cost in USD of a million checks by a deployment that runs all the time."""
    return price_an_hour * devices / (checks_per_second * SECONDS_AN_HOUR) * MILLION


@dataclass(frozen=True)
class JudgePrices:
    """The costs in USD of a million checks by an LLM judge, by the way in which it is asked.

    `a_prompt_a_rule`: the policy, then the conversation. `conversation_first`: the same with the
    conversation first, which all prompts but one read from the provider's cache; None where that
    has no price of its own. `one_prompt`: all policies in one prompt.
    """

    a_prompt_a_rule: float
    conversation_first: float | None
    one_prompt: float


def judge_prices(judge: JudgePricing, tokens: float, rules: float) -> JudgePrices:
    """The costs for conversations of `tokens` tokens that are put to `rules` rules, on average.

    The two numbers are taken as independent of each other.
    """
    prompt = judge.scaffold_tokens + tokens
    answers = rules * judge.output_tokens * judge.output
    a_prompt_a_rule = rules * (prompt + judge.policy_tokens) * judge.input + answers
    conversation_first = None
    if judge.cached_input is not None:
        read_again = (rules - 1) * prompt * judge.cached_input
        policies = rules * judge.policy_tokens * judge.input
        conversation_first = prompt * judge.input + read_again + policies + answers
    one_prompt = (prompt + rules * judge.policy_tokens) * judge.input + answers
    return JudgePrices(a_prompt_a_rule, conversation_first, one_prompt)
