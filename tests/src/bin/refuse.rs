//! `refuse ERRNO CALL[,CALL…] PROGRAM [ARG…]`: runs a program for which the kernel refuses these system
//! calls, as sandboxes do. ERRNO is EPERM, ENOSYS, EXDEV, EINVAL or EIO; `reflink` stands for the ioctl
//! FICLONERANGE, `copy_file_range_short` for a copy_file_range of less than 4 MiB.

use std::collections::BTreeMap;
use std::error::Error;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// Number of cachestat(2) on every architecture but Alpha.
const CACHESTAT: i64 = 451;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args_os().skip(1);
    let mut text = || args.next().ok_or("usage: refuse ERRNO CALL[,CALL…] PROGRAM [ARG…]");
    let errno = text()?;
    let calls = text()?;
    let program = text()?;
    let errno = match errno.to_str() {
        Some("EPERM") => libc::EPERM,
        Some("ENOSYS") => libc::ENOSYS,
        Some("EXDEV") => libc::EXDEV,
        Some("EINVAL") => libc::EINVAL,
        Some("EIO") => libc::EIO,
        _ => return Err(format!("{errno:?} is no error that this refuses with").into()),
    };
    let mut rules = BTreeMap::new();
    for call in calls.to_str().ok_or("the names are not UTF-8")?.split(',') {
        let (number, only) = rule(call)?;
        rules.insert(number, only);
    }
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(errno.unsigned_abs()),
        std::env::consts::ARCH.try_into()?,
    )?;
    let filter: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter(&filter)?;
    Err(Command::new(program).args(args).exec().into())
}

/// The number of a system call, and with which arguments alone it is refused.
fn rule(call: &str) -> Result<(i64, Vec<SeccompRule>), Box<dyn Error>> {
    let always = Vec::new();
    Ok(match call {
        "io_uring_setup" => (libc::SYS_io_uring_setup, always),
        "splice" => (libc::SYS_splice, always),
        "vmsplice" => (libc::SYS_vmsplice, always),
        "cachestat" => (CACHESTAT, always),
        "mincore" => (libc::SYS_mincore, always),
        "copy_file_range" => (libc::SYS_copy_file_range, always),
        "copy_file_range_short" => {
            let fifth = 4;
            let word = SeccompCmpArgLen::Qword;
            let short = SeccompCondition::new(fifth, word, SeccompCmpOp::Lt, 4 << 20)?;
            (libc::SYS_copy_file_range, vec![SeccompRule::new(vec![short])?])
        }
        "fallocate" => (libc::SYS_fallocate, always),
        "preadv2" => (libc::SYS_preadv2, always),
        "io_uring_register" => (libc::SYS_io_uring_register, always),
        "reflink" => {
            let second = 1;
            let word = SeccompCmpArgLen::Dword;
            let request = libc::FICLONERANGE;
            let only = SeccompCondition::new(second, word, SeccompCmpOp::Eq, request)?;
            (libc::SYS_ioctl, vec![SeccompRule::new(vec![only])?])
        }
        other => return Err(format!("{other} is not a call that this refuses").into()),
    })
}
