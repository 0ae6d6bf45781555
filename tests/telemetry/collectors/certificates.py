"""A certificate for `localhost` that signs itself, and its key: for tests, and of no use elsewhere."""

from __future__ import annotations

from typing import Final

CERTIFICATE: Final = """\
-----BEGIN CERTIFICATE-----
MIIBlDCCATugAwIBAgIUbe8eXQItgaMmat2tAkV+l3xxFX8wCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMjIwMTgxM1oYDzIxMjYxMDI5
MjAxODEzWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASxnBXmFBzh4/0djEFu/yxWkuNZmLuRmD+a5EY7Ms5o2l2XsHNqZnQh
gfo5+mDYD95oQ1XE5uz3+ISooAHIBPlno2kwZzAdBgNVHQ4EFgQUynDZtnTH+qM3
5fpNYQVHdyjm1bcwHwYDVR0jBBgwFoAUynDZtnTH+qM35fpNYQVHdyjm1bcwDwYD
VR0TAQH/BAUwAwEB/zAUBgNVHREEDTALgglsb2NhbGhvc3QwCgYIKoZIzj0EAwID
RwAwRAIgCLH2s4F1eAUGfIjjA/3hsrzkK22LV5LDmmT+Ns75HgwCIDhVYBG1OWmp
AGzAH7kLQN8tSf509GdhLCaXV+MvWCca
-----END CERTIFICATE-----
"""
PRIVATE_KEY: Final = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgrtjaCifuH5IvsuyJ
/nZJgMAExbH5mL/hnVeOOS+GqM2hRANCAASxnBXmFBzh4/0djEFu/yxWkuNZmLuR
mD+a5EY7Ms5o2l2XsHNqZnQhgfo5+mDYD95oQ1XE5uz3+ISooAHIBPln
-----END PRIVATE KEY-----
"""
