"""python -m services.prefill"""

from services.prefill.service import PrefillService
from shared.runtime.process import main
from shared.runtime.settings import PrefillSettings

if __name__ == "__main__":
    main(PrefillSettings, PrefillService)
