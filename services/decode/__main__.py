"""python -m services.decode"""

from services.decode.service import DecodeService
from shared.runtime.process import main
from shared.runtime.settings import DecodeSettings

if __name__ == "__main__":
    main(DecodeSettings, DecodeService)
