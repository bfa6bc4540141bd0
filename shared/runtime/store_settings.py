"""What a kvstore keeps, and for how long."""

from typing import Annotated

from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings


class StoreSettings(BaseSettings):
    """Part of a kvstore's settings."""

    memory_mib: Annotated[int, Field(ge=1)] = Field(
        256, description="MiB of memory for the blocks of one model; taken as they come"
    )
    driver: str | None = Field(
        "disk", description="what keeps blocks beneath the memory, as in disk or memory; none: nothing does"
    )
    driver_where: str = Field(
        "",
        description="disk: a directory of its own (default: STATE_DIR/blocks); others: the address of their server",
    )
    driver_bytes: ByteSize | None = Field(
        ByteSize(8 << 30), description="most that blocks may take there, as in 50GiB; none: all there is"
    )
    driver_fsync: bool = Field(True, description="disk: a block counts as written only when the device has it")
    tenant_bytes: ByteSize = Field(
        ByteSize(0), description="most that one tenant's blocks may take, as in 10GiB; 0: no limit"
    )
    ttl_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.0, description="blocks that nobody has put, found or offered for so long vanish; 0: only for want of room"
    )
