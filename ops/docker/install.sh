#!/bin/sh
# install.sh ARGUMENTS: `pip install` into /opt/baton within our pinned versions, without what only developers need.
set -eu
python3 -m pip --python /opt/baton/bin/python install --quiet -c constraints.txt "$@"
cd /opt/baton/lib/python3*/site-packages
find . -type d -name tests -prune -exec rm -rf {} +
if [ -d torch ]; then
    rm -rf torch/include torch/test torch/share
    find torch/bin -type f ! -name torch_shm_manager -delete
fi
