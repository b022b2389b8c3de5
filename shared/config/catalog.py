"""The models of a deployment by id, and its batch rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shared.config.batch_rules import BatchRules
from shared.config.model_facts import ModelFacts
from shared.config.model_spec import ModelSpec
from shared.errors import UnknownModel


class Catalog:
    """The models of a deployment by id, and its batch rules."""

    def __init__(self, specs: tuple[ModelSpec, ...], rules: BatchRules | None = None) -> None:
        self._of_file = {spec.id: spec for spec in specs}
        self._specs = dict(self._of_file)
        self._names = {name: spec for spec in specs for name in (*spec.aliases, spec.id)}
        self._facts: dict[str, ModelFacts] = {}
        self.version = 0
        """Grows when what is known of a model changes."""
        self._rules = rules or BatchRules(schema_version=1, rules=())

    def replace(self, other: Catalog) -> bool:
        """Take over the models and rules of another one; return whether that changes anything.

        What is known of unchanged models stays.
        """
        if list(self._of_file.items()) == list(other._of_file.items()) and self._rules == other._rules:
            return False
        changed, facts = self.changed_in(other), self._facts
        self._of_file, self._rules, self._facts = other._of_file, other._rules, {}
        self._specs, self._names = dict(other._of_file), dict(other._names)
        self.version += 1
        self.learn({model: one for model, one in facts.items() if model not in changed})
        return True

    def changed_in(self, other: Catalog) -> frozenset[str]:
        """Return the models that another one lacks, or whose weights or code must be loaded anew for it."""
        return frozenset(
            model
            for model, spec in self._of_file.items()
            if model not in other._of_file or not spec.is_loaded_like(other._of_file[model])
        )

    def learn(self, facts: Mapping[str, ModelFacts]) -> None:
        """Replace what is known of models by what workers know of those that they have loaded, by id."""
        for model in {**self._facts, **facts}:
            one = facts.get(model)
            if self._facts.get(model) != one:
                of_file = self._of_file[model]
                self._specs[model] = learned = of_file if one is None else of_file.with_facts(one)
                self._names |= dict.fromkeys((*learned.aliases, model), learned)
                self.version += 1
        self._facts = dict(facts)

    def __iter__(self) -> Iterator[ModelSpec]:
        return iter(self._specs.values())

    @property
    def expected_s(self) -> dict[str, float]:
        """Return the expected GPU-seconds of one image or video by model, where the file has them."""
        return {spec.id: spec.expected_image_s for spec in self if spec.expected_image_s is not None}

    def __len__(self) -> int:
        return len(self._specs)

    @property
    def devices(self) -> int:
        """The devices of a worker: as many as the model with the most uses."""
        return max((spec.devices for spec in self), default=1)

    def get(self, model: str) -> ModelSpec:
        """Return a model by id or alias, or raise `UnknownModel` listing all ids."""
        try:
            return self._names[model]
        except KeyError:
            known = ", ".join(sorted(self._specs))
            raise UnknownModel(f"unknown model: {model!r}; available: {known}", param="model") from None

    def find(self, model: object) -> ModelSpec | None:
        """Return a model by id or alias, None for any other value."""
        return self._names.get(model) if isinstance(model, str) else None

    def id_of(self, name: str) -> str:
        """Return the id of the model that a name means; a name of none is returned as it is."""
        spec = self._names.get(name)
        return name if spec is None else spec.id

    def for_size(self, model: str, width: int, height: int) -> ModelSpec:
        """Return a model with the `max_batch` of an image size."""
        spec = self.get(model)
        max_batch = self._rules.max_batch((spec.id, spec.source), spec.max_batch, width, height)
        return spec if max_batch == spec.max_batch else spec.model_copy(update={"max_batch": max_batch})
