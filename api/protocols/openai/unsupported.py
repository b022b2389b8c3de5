"""Calls of OpenAI's SDKs that this service lacks: 404 with a sentence that names the call to use instead."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.responses import Response

from shared.errors import NotFound

_INSTEAD = {
    "/v1/images/variations": "variations are not supported; use POST /v1/images/edits with a prompt and `strength`",
    "/v1/videos/{video_id}/remix": "remixes are not supported; use POST /v1/videos with another prompt and the `seed`",
    "/v1/videos/edits": "video edits are not supported; use POST /v1/videos with an image as `input_reference`",
    "/v1/videos/extensions": "extensions are not supported; use POST /v1/videos with an image as `input_reference`",
    "/v1/videos/characters": "characters are not supported; use a LoRA adapter of the model",
    "/v1/audio/speech": "speech is not supported; for music and sounds use POST /v1/jobs with a model that makes them",
    "/v1/audio/transcriptions": "transcriptions are not supported",
    "/v1/audio/translations": "translations are not supported",
    "/v1/uploads": "uploads in parts are not supported; send the whole file to POST /v1/files",
    "/v1/uploads/{path:path}": "uploads in parts are not supported; send the whole file to POST /v1/files",
    "/v1/chat/completions": "chat is not supported; use POST /v1/images/generations, /v1/images/edits or /v1/videos",
    "/v1/responses": "responses are not supported; use POST /v1/images/generations, /v1/images/edits or /v1/videos",
}

router = APIRouter(include_in_schema=False)


def _refuse(sentence: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise NotFound(sentence)

    return refuse


for _path, _sentence in _INSTEAD.items():
    router.add_api_route(_path, _refuse(_sentence), methods=["POST"])
