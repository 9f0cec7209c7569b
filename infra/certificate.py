"""Certificates by which programs of one user recognise each other, and refuse everybody else.

All such programs show the same certificate, and trust no other one: there is no authority whose key could sign more.
"""

from __future__ import annotations

from datetime import UTC, datetime
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""RFC 5280's date for a certificate that never expires. SeaweedFS cannot load a new one while it runs."""
_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
"""They must not refuse each other when a clock was set back."""


def own_certificate(name: str) -> str:
    """Draw a private key, and return it and a certificate for it that it signed itself, both as PEM in one text.

    Args:
        name: says what it is for; it is valid for the loopback address of this machine.
    """
    key, subject = ec.generate_private_key(ec.SECP256R1()), x509.NameAttribute(NameOID.COMMON_NAME, name)
    here = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    both_sides = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([subject]))
        .issuer_name(x509.Name([subject]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_LONG_AGO)
        .not_valid_after(NEVER)
        .add_extension(x509.SubjectAlternativeName(here), critical=False)
        .add_extension(x509.ExtendedKeyUsage(both_sides), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return (certificate.public_bytes(pem) + private).decode()
