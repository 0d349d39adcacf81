"""Who a process is to a syncer: keys, tokens and names, and what is refused of them."""

import datetime as dt
import logging
import os

import pytest

import skerry.run.keys
from skerry.errors import ConfigError, KeysError, WireError
from skerry.run.keys import Keys
from skerry.shell.address import parse_addresses
from skerry.shell.identity import admin_token, check_private, identity, read_owner, read_token, secrets_of
from skerry.wire.tls import Tls, name_of

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of somebody else's")


def secret(path, content):
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def test_a_token_is_the_files_content_without_white_space_around_it(tmp_path):
    secret(tmp_path / "token", b"\n  a secret of twenty-nine bytes\n\n")
    assert read_token(tmp_path / "token") == read_token(str(tmp_path / "token")) == b"a secret of twenty-nine bytes"


def test_a_token_of_less_than_128_bits_is_refused(tmp_path):
    path = tmp_path / "token"
    for enough in (b"0123456789abcdef" * 2, b"abcdefghijKLMNOPQRST+/", bytes(range(128, 144))):
        assert read_token(secret(path, enough)) == enough
    for too_short in (b"0123456789abcdef", b"0123456789abcdef" * 2, b"abcdefghijKLMNOPQRST+", bytes(range(128, 143))):
        too_short = too_short[:-1] if len(too_short) == 32 else too_short
        with pytest.raises(WireError, match="bits at most, and at least 128 are needed: make one with openssl"):
            read_token(secret(path, too_short))
    with pytest.raises(WireError, match="the token is easily guessed: make one"):
        read_token(secret(path, b"a" * 64))
    with pytest.raises(WireError, match="the token is empty: make one with openssl"):
        read_token(secret(path, b"\n"))


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602, 0o666])
def test_a_token_that_others_may_read_or_change_is_refused(tmp_path, mode):
    path = secret(tmp_path / "token", b"0123456789abcdef" * 2)
    path.chmod(mode)
    with pytest.raises(WireError, match="others may read or change this token: chmod 600"):
        read_token(path)


def test_a_pipe_in_place_of_a_token_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "token", 0o600)
    with pytest.raises(WireError, match=r"token: the token cannot be read \(is no plain file\)"):
        read_token(tmp_path / "token")


def test_a_token_that_cannot_be_read_is_refused_with_its_path(tmp_path):
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "is no plain file")):
        with pytest.raises(WireError) as refusal:
            read_token(path)
        said = str(refusal.value)
        assert said.startswith(f"{path}: the token cannot be read ({why}") and "; check" in said and "\n" not in said


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch):
    for word in ("NAME", "TOKEN_FILE", "KEY_FILE"):
        monkeypatch.delenv(f"SKERRY_{word}", raising=False)


@pytest.fixture
def key(tmp_path):
    return secret(tmp_path / "a.key", Keys(tmp_path / "run").issue("island-a").pem)


def test_a_key_says_the_name(key, monkeypatch):
    assert identity(None, None, key) == ("island-a", None, str(key)) == identity("island-a", None, str(key))
    monkeypatch.setenv("SKERRY_KEY_FILE", str(key))
    assert identity(None, None, None) == ("island-a", None, str(key))


def test_a_relative_path_is_good_in_a_process_that_works_elsewhere(key, monkeypatch):
    monkeypatch.chdir(key.parent)
    assert identity(None, None, "a.key").key_file == str(key)


def test_another_name_than_the_keys_is_refused_in_the_users_own_words(key, monkeypatch):
    with pytest.raises(ConfigError, match=r"^name \(or SKERRY_NAME\) = b, and .*a.key is the key of island-a: leave"):
        identity("b", None, key)
    monkeypatch.setenv("SKERRY_NAME", "b")
    with pytest.raises(ConfigError, match=r"^--name \(or SKERRY_NAME\) = b, "):
        identity(None, None, key, lambda word: f"--{word}")


@pytest.mark.parametrize("name", ["x" * 65, "x" * 300, "Ada", "-x", "a/b", "\x1b[31m"])
def test_a_name_that_no_syncer_takes_is_refused_however_it_is_given(key, monkeypatch, name):
    says = r"^learner name .* use 1 to 64 of a-z, 0-9, '\.', '_' and '-', and begin with a letter or a digit$"
    for given in (lambda: identity(name, None, None), lambda: identity(name, None, key)):
        with pytest.raises(ConfigError, match=says) as refusal:
            given()
        assert len(str(refusal.value)) < 250 and str(refusal.value).isprintable()
    monkeypatch.setenv("SKERRY_NAME", name)
    with pytest.raises(ConfigError, match=says):
        identity(None, None, None)


def test_the_key_for_orders_is_no_learners(tmp_path):
    admin = Keys(tmp_path / "run").admin_file()
    with pytest.raises(ConfigError, match=r"admin\.pem: is no learner's key: ask for one"):
        identity(None, None, admin)


def test_a_key_and_a_token_are_one_too_many(key, tmp_path, monkeypatch):
    token = secret(tmp_path / "token", b"x" * 32)
    with pytest.raises(ConfigError, match="with a key no token is needed"):
        identity(None, token, key)
    monkeypatch.setenv("SKERRY_TOKEN_FILE", str(token))
    assert secrets_of(None, key) == (None, str(key))  # what is given comes before what the environment says
    monkeypatch.setenv("SKERRY_KEY_FILE", str(key))
    with pytest.raises(ConfigError, match="with a key no token is needed"):
        secrets_of(None, None)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602])
def test_a_key_that_others_may_read_or_change_is_refused(key, mode):
    key.chmod(mode)
    with pytest.raises(WireError, match=r"a\.key: others may read or change this key: chmod 600"):
        identity(None, None, key)


def test_a_file_that_is_no_learners_key_is_refused(key, tmp_path):
    keys = Keys(tmp_path / "run")
    for path, said in (
        (tmp_path / "none", "the key cannot be read"),
        (secret(tmp_path / "junk", b"x" * 99), "junk: holds no key and certificate: ask for another"),
        (keys.syncer_file(), r"syncer\.pem: is no learner's key: ask for one"),
        (keys.folder / "ca.pem", r"ca\.pem: is no learner's key: ask for one"),
    ):
        with pytest.raises((WireError, KeysError), match=said):
            identity(None, None, path)


def test_what_a_connection_would_refuse_of_a_key_is_refused_before_there_is_one(key, tmp_path, monkeypatch):
    """In the caller's process: the one beside it would end of it, and say less."""
    pem = key.read_bytes()
    with pytest.raises(KeysError, match=r"cut\.key: is no key file: it has 1 certificates instead of 2: ask for"):
        identity(None, None, secret(tmp_path / "cut.key", pem[: pem.rindex(b"-----BEGIN")]))
    soon = dt.datetime.now(dt.UTC).replace(microsecond=0) + dt.timedelta(days=3)
    with monkeypatch.context() as patched:
        patched.setattr(skerry.run.keys, "_now", lambda: soon)
        pem = Keys(tmp_path / "run").issue("island-b").pem
    with pytest.raises(KeysError, match=r"b\.key: the key is not good before .*: set this machine's clock"):
        identity(None, None, secret(tmp_path / "b.key", pem))


def test_that_a_key_ends_soon_is_said_once(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    identity(None, None, secret(tmp_path / "c.key", Keys(tmp_path / "run").issue("island-c", days=2).pem))
    assert caplog.text.count("expires in") == 1


def test_another_machine_is_not_dialled_in_the_clear_unless_somebody_says_so(monkeypatch, tmp_path):
    here, there = ("127.0.0.1", 7077), ("192.0.2.1", 7077)
    check_private([here, ("localhost", 1), ("::1", 1), ("", 1)], None, False)
    with pytest.raises(ConfigError, match=r"192.0.2.1:7077 is another machine.*give key_file \(or.*insecure=True"):
        check_private([here, there], None, False)
    with pytest.raises(ConfigError, match=r"give --key-file \(or SKERRY_KEY_FILE\).*--insecure"):
        check_private([there], None, False, lambda option: f"--{option.replace('_', '-')}")
    check_private([there], "some.key", False)
    check_private([there], None, True)
    monkeypatch.setenv("SKERRY_INSECURE", "1")
    check_private([there], None, False)
    for word in ("false", "no", "true"):
        monkeypatch.setenv("SKERRY_INSECURE", word)
        with pytest.raises(ConfigError, match=rf"^SKERRY_INSECURE = {word}: give 1 to dial another machine without"):
            check_private([there], None, False)


def test_a_file_with_the_address_is_dialled_with_a_key_or_on_purpose_whatever_it_says_now(tmp_path):
    """It is read at each dialling, and may name another machine by then."""
    file = tmp_path / "address"
    file.write_text("127.0.0.1:7077")
    given = parse_addresses(f"@{file}")
    with pytest.raises(
        ConfigError, match=rf"^@{file} names a file, which may lead to another machine; .*insecure=True"
    ):
        check_private(given, None, False)
    check_private(given, "some.key", False)
    check_private(given, None, True)
    file.unlink()
    with pytest.raises(ConfigError, match=rf"^@{file}: there is no file '{file}': name the one that"):
        check_private(given, None, False)


def test_an_admin_token_is_made_once_for_its_owner_alone_and_through_no_link(tmp_path):
    made = admin_token(tmp_path)
    file = tmp_path / "admin.token"
    assert len(made) == 64 and file.stat().st_mode & 0o777 == 0o600 and read_token(file) == made
    assert admin_token(tmp_path) == made
    file.chmod(0o644)
    with pytest.raises(WireError, match=r"others may read or change the admin token: remove it"):
        admin_token(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("f" * 64)
    file.unlink()
    file.symlink_to(elsewhere)
    with pytest.raises(WireError, match=r"admin\.token: the admin token cannot be read"):
        admin_token(tmp_path)
    assert elsewhere.read_text() == "f" * 64


@only_root
def test_a_token_or_key_of_somebody_else_is_refused_as_that_whatever_its_mode(key, tmp_path):
    """Whoever owns it knows what is in it."""
    for path, read in (
        (secret(tmp_path / "token", b"0123456789abcdef" * 2), read_token),
        (key, read_owner),
        (key, Tls),
        (key, name_of),
    ):
        os.chown(path, 4242, 4242)
        with pytest.raises((WireError, KeysError)) as refusal:
            read(path)
        said = str(refusal.value)
        assert said.startswith(f"{path}: belongs to another user (id 4242): run this as that user, or ")


@only_root
def test_what_root_hands_to_another_user_is_believed(key, tmp_path, monkeypatch):
    """As a cluster does with the secrets of its containers: root reads everything anyway."""
    token = secret(tmp_path / "token", b"0123456789abcdef" * 2)
    made = admin_token(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert read_token(token) == b"0123456789abcdef" * 2 and admin_token(tmp_path) == made
    assert read_owner(key) == name_of(key) == "island-a"
    os.chown(token, 4243, 4243)
    with pytest.raises(WireError, match=r"belongs to another user \(id 4243\)"):
        read_token(token)


@only_root
def test_an_admin_token_of_somebody_else_is_refused_as_that(tmp_path):
    admin_token(tmp_path)
    os.chown(tmp_path / "admin.token", 4242, 4242)
    with pytest.raises(WireError, match=r"admin\.token: belongs to another user \(id 4242\): run this as that user"):
        admin_token(tmp_path)
