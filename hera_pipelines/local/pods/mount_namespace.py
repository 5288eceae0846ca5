"""Gives a program a mount namespace, in which the paths of its step are the step's own, as in a container.

The program sees the file system of this machine, except for what the plan of
`pod_paths` mounts over it. The kernel removes the mounts with the last process in
the namespace, also after SIGKILL. Root needs no more than that; for other users a
user namespace permits the mounts, in which user and group keep their ids.

Runs in a bare interpreter, without Tiphys imports: `init_process` imports it just
before it starts a program with such a plan. As a program, it tries a plan and exits.
"""

import ctypes
import os
import sys

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_UNBINDABLE, _MS_PRIVATE, _MS_SLAVE = 0x1000, 0x4000, 1 << 17, 1 << 18, 1 << 19
_MNT_DETACH = 2
OWN, MACHINE = b"own", b"machine"
_LIBRARY = ctypes.CDLL(None, use_errno=True)


def enter_mount_namespace(plan: str) -> None:
    """Move this process, which must have one thread, into a new mount namespace with the mounts of the file ``plan``.

    Raises:
        OSError: the kernel refuses; the process is then fit for nothing but its end.
    """
    with open(plan, "rb") as file:
        new_root, *fields = file.read().split(b"\0")
    working_folder = os.getcwdb()
    _unshare()
    _mount(None, b"/", _MS_REC | _MS_SLAVE)  # first of all: no mount below may reach the machine
    for kind, source, target in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
        _bind(source, new_root + target, is_optional=kind == MACHINE)
        if target == b"/":  # a later mount of a folder around the new root must not contain the new root
            _mount(None, new_root, _MS_UNBINDABLE)
    os.chdir(new_root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _MNT_DETACH)  # the old root lies above the new one
    _mount(None, b"/", _MS_PRIVATE)  # the program may make namespaces too
    os.chdir(working_folder)


def _unshare() -> None:
    user, group = os.geteuid(), os.getegid()
    try:
        _call("unshare", _CLONE_NEWNS)
    except PermissionError:  # without CAP_SYS_ADMIN, which root of a container may lack too
        _call("unshare", _CLONE_NEWNS | _CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _bind(source: bytes, target: bytes, *, is_optional: bool) -> None:
    """Mount ``source`` at ``target``, which is created; an entry of the machine may vanish meanwhile, or be private."""
    if is_optional and os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.lexists(target):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    try:
        _mount(source, target, _MS_BIND | _MS_REC)
    except (FileNotFoundError, PermissionError):
        if not is_optional:
            raise
        (os.rmdir if os.path.isdir(target) else os.unlink)(target)


def _mount(source: bytes | None, target: bytes, flags: int) -> None:
    _call("mount", source, target, None, ctypes.c_ulong(flags), None)


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBRARY, name)(*arguments) != 0:
        code = ctypes.get_errno()
        where = " ".join(os.fsdecode(part) for part in arguments if isinstance(part, bytes))
        raise OSError(code, f"{name}: {os.strerror(code)}", where or None)


if __name__ == "__main__":
    try:
        enter_mount_namespace(sys.argv[1])
    except (OSError, AttributeError) as error:  # AttributeError: a system without these calls
        sys.exit(str(error))
