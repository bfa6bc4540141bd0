"""What a kvstore keeps, and for how long."""

from typing import Annotated

from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings


class StoreSettings(BaseSettings):
    """Part of a kvstore's settings."""

    memory_mib: Annotated[int, Field(ge=1)] = Field(
        256, description="MiB of memory for the blocks of one model; taken as they come"
    )
    tenant_bytes: ByteSize = Field(
        ByteSize(0), description="most that one tenant's blocks may take, as in 10GiB; 0: no limit"
    )
    ttl_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0, description="blocks that nobody has put, found or offered for so long vanish; 0: only for want of room"
    )
