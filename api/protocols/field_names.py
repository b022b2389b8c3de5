"""Names of job fields in the inputs of other protocols."""

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from shared.errors import InvalidRequest, first_of


@dataclass(frozen=True)
class FieldNames:
    """Maps job fields to the names in the client's input, for error messages.

    `prefix` is that of the names in the body. The fields of `scalars` are no lists or objects, unlike the job fields.
    Those of `kept` are names of the input already. `parts` are other names within a field of the input, such as those
    of the fields of its list's objects.
    """

    names: Mapping[str, str]
    prefix: str
    scalars: Collection[str]
    kept: Collection[str]
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @contextlib.contextmanager
    def in_errors(self) -> Iterator[None]:
        """Rename the fields of `InvalidRequest` errors to those of the input."""
        try:
            yield
        except InvalidRequest as error:
            renamed = [self._renamed(fault) for fault in error.faults]
            # Width and height of one field can have the same fault.
            raise first_of(list({(fault.param, fault.message): fault for fault in renamed}.values())) from error

    def _renamed(self, error: InvalidRequest) -> InvalidRequest:
        root, dot, rest = (error.param or "").partition(".")
        if not root or root in self.kept:
            return error
        name = self.names.get(error.param or "", self.names.get(root, root))
        if name in self.scalars:  # a scalar, unlike the job field made from it
            root, dot, rest = root + dot + rest, "", ""
        path, parts = f"{self.prefix}{name}", self.parts.get(name, {})
        named = ".".join(parts.get(part, part) for part in rest.split("."))
        if rest and error.message.startswith(f"{root}.{rest}:"):
            return type(error)(f"{path}.{named}{error.message.removeprefix(f'{root}.{rest}')}", param=f"{path}.{named}")
        message, found = re.subn(rf"^{re.escape(root)}\b", lambda _: path, error.message)
        if not found:
            message = f"{path}: {message}"
        return type(error)(message, param=path + dot + named)
