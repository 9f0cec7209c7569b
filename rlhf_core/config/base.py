"""What every configuration is: frozen, and refusing keys that it does not know."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[int, Field(ge=1)]
Dtype = Literal["float32", "bfloat16", "float16"]


class Config(BaseModel):
    """A frozen configuration that refuses unknown keys; null empties a list or a mapping, as it clears an option."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _null_empties(cls, value: Any, field: ValidationInfo) -> Any:
        kind = get_origin(cls.model_fields[str(field.field_name)].annotation)
        return kind() if value is None and kind in {tuple, dict} else value
