"""python -m services.gateway"""

from services.gateway.service import GatewayService
from shared.runtime.process import main
from shared.runtime.settings import GatewaySettings

if __name__ == "__main__":
    main(GatewaySettings, GatewayService)
