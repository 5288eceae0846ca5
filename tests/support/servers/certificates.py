"""A certificate authority of a test, and a server on the loopback device that it vouches for."""

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_FROM, _TO = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


def authority(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """Certificate of the authority, and what a server on 127.0.0.1 needs."""
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = _certificate("authority", "authority", ca_key.public_key(), ca_key, is_authority=True)
    certificate = _certificate("server", "authority", key.public_key(), ca_key, is_authority=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ca.crt").write_bytes(_pem(ca))
    (folder / "server.crt").write_bytes(_pem(certificate))
    private = serialization.PrivateFormat.PKCS8
    encoded = key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption())
    (folder / "server.key").write_bytes(encoded)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    return folder / "ca.crt", context


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _certificate(
    subject: str,
    issuer: str,
    key: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool,
) -> x509.Certificate:
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_TO)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(address, critical=False)
    )
    return builder.sign(signer, hashes.SHA256())


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])
