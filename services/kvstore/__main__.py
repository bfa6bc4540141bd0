"""python -m services.kvstore"""

from services.kvstore.service import KvstoreService
from shared.runtime.process import main
from shared.runtime.settings import KvstoreSettings

if __name__ == "__main__":
    main(KvstoreSettings, KvstoreService)
