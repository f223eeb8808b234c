"""Renders chat templates with Python's Jinja, set up as Hugging Face does it.

    render.py TEMPLATE < cases.json > renderings.json

A case is an object with `messages` and, as it likes, `tools` and other variables of the template.
Its rendering is {"text": ...}, or {"error": ...} where the template or Jinja raised.
The renderings of this project's own template are kept beside the cases:

    render.py ../../../../demo/chat_template.jinja < cases.json > renderings.json
"""

import json
import sys

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


def raise_exception(message):
    raise TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def main():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    with open(sys.argv[1], encoding="utf-8", newline="") as f:
        template = env.from_string(f.read())
    renderings = []
    for case in json.load(sys.stdin):
        case.pop("name", None)
        case.setdefault("add_generation_prompt", True)
        try:
            renderings.append({"text": template.render(**case)})
        except (TemplateError, TypeError) as e:
            renderings.append({"error": str(e)})
    json.dump(renderings, sys.stdout, ensure_ascii=True, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
