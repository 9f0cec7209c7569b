"""What every configuration is: frozen, and deaf to no unknown key."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Dtype = Literal["float32", "bfloat16", "float16"]


class Config(BaseModel):
    """A frozen configuration that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
