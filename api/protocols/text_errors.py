"""Errors of protocols whose clients print `error`: Hugging Face's client, and Vercel's of Replicate."""

from starlette.responses import Response

from api.errors import ErrorForm, ErrorObject, Problem, ProblemFacts, problem_response


class TextProblem(Problem):
    """Every error of these paths, whose `error` is its text, except where the server refuses a request unread."""

    error: str | ErrorObject  # type: ignore[assignment]


def text_errors(prefix: str) -> ErrorForm:
    """Return the form of the errors of the paths below `prefix`."""
    return ErrorForm((f"{prefix}/",), TextProblem, _respond)


def _respond(facts: ProblemFacts) -> Response:
    return problem_response(facts, TextProblem, facts.detail)
