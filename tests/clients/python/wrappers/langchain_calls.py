"""LangChain's image wrapper."""

from __future__ import annotations

import urllib.request

import checks
import openai
from checks import KEY, MODEL, PROMPT, URL, call, check_image, refused, same
from langchain_community.utilities.dalle_image_generator import DallEAPIWrapper

SERVER = {"model": MODEL, "api_key": KEY, "base_url": f"{URL}/v1"}


@call("DallEAPIWrapper.run")
def generate() -> None:
    urls = DallEAPIWrapper(**SERVER, size="64x64", n=2).run(PROMPT).splitlines()
    same(len(urls), 2)
    for url in urls:
        with urllib.request.urlopen(url, timeout=30) as download:  # without the key
            check_image(download.read())


@call("errors: BadRequestError")
def errors() -> None:
    with refused(openai.BadRequestError, "size"):
        DallEAPIWrapper(**SERVER).run(PROMPT)  # 1024x1024


checks.main()
