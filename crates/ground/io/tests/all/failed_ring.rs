//! When the kernel refuses a ring in use, operations in flight fail and the worker continues.

use std::os::unix::net::UnixStream;

use blockhaul_io::{Buf, File, IoEngine, Runtime, RuntimeConfig, Stream};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

/// Refuses a system call on this thread from now on.
fn refuse(call: i64) {
    let rules = [(call, Vec::new())].into();
    let errno = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, errno, arch).unwrap();
    let filter: BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter(&filter).unwrap();
}

#[test]
fn a_ring_that_fails_fails_its_operations_and_the_worker_goes_on() {
    if blockhaul_io::uring_available().is_err() {
        eprintln!("io_uring is refused here: nothing to check");
        return;
    }
    let runtime = Runtime::start(&RuntimeConfig { workers: 1, engine: IoEngine::Uring }).unwrap();
    let mut named = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut named, &[7; 4096]).unwrap();
    let file = File::new(named.into_file().into());
    runtime.block_on(move || async move {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let stream = Stream::new(ours.into()).unwrap();
        let waits = blockhaul_io::spawn(async move { stream.readable().await });
        blockhaul_io::yield_now().await;
        let begun = file.start_read(Buf::unpooled(4096), 0, 0);
        refuse(libc::SYS_io_uring_enter);
        let (result, _) = begun.await;
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EIO), "a read in progress");
        let error = waits.await.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "a wait in progress");

        assert_eq!(blockhaul_io::engine_name(), "threads");
        let (result, buf) = file.read_at(Buf::unpooled(4096), 0, 0).await;
        assert_eq!((result.unwrap(), buf[4095]), (4096, 7));
        blockhaul_io::sleep(std::time::Duration::from_millis(1)).await;
    });
}
