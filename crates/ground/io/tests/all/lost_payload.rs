//! A payload in the kernel whose storage fails returns an error when it is read, and does not
//! panic.

use std::io::Write;
use std::os::unix::net::UnixStream;

use blockhaul_io::{Data, File, ParkedPayload, Pool, SendQueue, Stream};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

const LEN: usize = 128 << 10;

/// Refuses a system call on this thread from now on.
fn refuse(call: i64) {
    let rules = [(call, Vec::new())].into();
    let errno = SeccompAction::Errno(libc::ENODATA.unsigned_abs());
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, errno, arch).unwrap();
    let filter: BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter(&filter).unwrap();
}

#[test]
fn a_parked_payload_that_is_lost_is_an_error_each_time() {
    // On a thread of its own: a test that runs alone has the thread of all tests.
    std::thread::spawn(lose_a_payload).join().unwrap();
}

fn lose_a_payload() {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[7; LEN]).unwrap();
    let file = File::new(file.into());
    let pool = Pool::new(1 << 20);
    let park = || {
        let room = pool.try_reserve(LEN).unwrap().parkable();
        let mut parked = ParkedPayload::begin(room).expect("a pipe is free");
        parked.fill_from_file(&file, 0).unwrap();
        Data::from(parked)
    };
    let good = park();
    let lost = park();
    good.load().unwrap();
    assert!(good.bytes().iter().all(|&byte| byte == 7));
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let stream = Stream::new(ours.into()).unwrap();

    // The error of a pipe for a page that its file has lost meanwhile.
    refuse(libc::SYS_read);
    for _ in 0..2 {
        assert_eq!(lost.load().unwrap_err().raw_os_error(), Some(libc::ENODATA));
        assert_eq!(lost.slice(1, 2).load().unwrap_err().raw_os_error(), Some(libc::ENODATA));
    }
    let mut queue = SendQueue::default();
    let second = lost.clone();
    queue.head(b"header");
    queue.data(lost);
    assert_eq!(queue.send(&stream).unwrap_err().raw_os_error(), Some(libc::ENODATA));
    drop((good, second));
    assert_eq!(pool.reserved(), 0, "its room is given back");
}
