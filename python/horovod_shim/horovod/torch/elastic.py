import sys

import gohvd.torch.elastic
from gohvd.torch.elastic import sampler, state

sys.modules[__name__] = gohvd.torch.elastic
sys.modules[__name__ + ".sampler"] = sampler
sys.modules[__name__ + ".state"] = state
