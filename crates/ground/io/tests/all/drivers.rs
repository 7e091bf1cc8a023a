//! One suite for all drivers: a worker behaves the same on each of them.

use std::io::{IoSliceMut, Seek, Write};
use std::net::SocketAddr;
use std::task::Poll;
use std::time::{Duration, Instant};

use blockhaul_io::{
    Buf, Data, FallocateMode, File, IoEngine, Listener, RecvWindow, Runtime, RuntimeConfig, Stream,
    WorkerHandle,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with};

/// Runs a check on every engine that this machine offers; threads are always available.
fn on_every_engine(check: impl Fn(Runtime)) {
    for engine in [IoEngine::Uring, IoEngine::Threads] {
        if engine == IoEngine::Uring && blockhaul_io::uring_available().is_err() {
            eprintln!("io_uring is refused here: checked with threads only");
            continue;
        }
        check(Runtime::start(&RuntimeConfig { workers: 2, engine }).unwrap());
    }
}

#[test]
fn the_engine_is_the_one_asked_for() {
    on_every_engine(|runtime| {
        let name = runtime.block_on(|| async { blockhaul_io::engine_name() });
        assert!(["uring", "threads"].contains(&name));
        assert_eq!(
            runtime.block_on(|| async { (blockhaul_io::worker(), blockhaul_io::worker_count()) }),
            (0, 2)
        );
    });
}

#[test]
fn sockets_carry_bytes_between_workers() {
    on_every_engine(|runtime| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let total = 3 << 20;
        let received = runtime.block_on(move || async move {
            let listener = Listener::bind_unix(&path).unwrap();
            let client = WorkerHandle::to(1).spawn(move || async move {
                let stream = Stream::connect_unix(&path).await.unwrap();
                let bytes: Vec<u8> = (0..total).map(|i| (i % 251) as u8).collect();
                stream.send_all(&bytes).await.unwrap();
                stream.shutdown_send();
                let mut rest = [0; 8];
                stream.recv(&mut [IoSliceMut::new(&mut rest)]).await.unwrap()
            });
            let stream = Stream::new(listener.accept().await.unwrap()).unwrap();
            let mut all = Vec::new();
            let mut chunk = vec![0; 64 << 10];
            loop {
                let got = stream.recv(&mut [IoSliceMut::new(&mut chunk)]).await.unwrap();
                if got == 0 {
                    break;
                }
                all.extend_from_slice(&chunk[..got]);
            }
            drop(stream);
            assert_eq!(client.await.unwrap(), 0, "the end of the stream");
            all
        });
        assert_eq!(received.len(), total);
        assert!(received.iter().enumerate().all(|(i, &byte)| byte == (i % 251) as u8));
    });
}

#[test]
fn refused_connections_are_errors() {
    on_every_engine(|runtime| {
        let kind = runtime.block_on(|| async {
            // Bound, so that no other program gets it; and without a listener.
            let family = AddressFamily::INET;
            let kind = SocketType::STREAM;
            let taken = socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
            bind(&taken, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
            let address = SocketAddr::try_from(getsockname(&taken).unwrap()).unwrap();
            Stream::connect_tcp(address).await.unwrap_err().kind()
        });
        assert_eq!(kind, std::io::ErrorKind::ConnectionRefused);
    });
}

#[test]
fn files_are_written_read_zeroed_and_freed() {
    on_every_engine(|runtime| {
        runtime.block_on(|| async {
            let file = File::new(tempfile::tempfile().unwrap().into());
            let data = Data::copy_of(&[7; 100_000]);
            file.write_all_at(data, 5_000).await.unwrap();
            file.sync().await.unwrap();
            let (result, buf) = file.read_exact_at(Buf::unpooled(105_000), 0).await;
            result.unwrap();
            assert!(buf[..5_000].iter().all(|&byte| byte == 0));
            assert!(buf[5_000..].iter().all(|&byte| byte == 7));
            let (result, _) = file.read_exact_at(Buf::unpooled(10), 104_995).await;
            assert_eq!(result.unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
            match file.allocate(FallocateMode::PunchHole, 8_192, 8_192).await {
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc_eopnotsupp())),
                Ok(()) => {
                    let (_, buf) = file.read_exact_at(Buf::unpooled(8_192), 8_192).await;
                    assert!(buf.iter().all(|&byte| byte == 0));
                }
            }
        });
    });
}

fn libc_eopnotsupp() -> i32 {
    95
}

#[test]
fn a_dropped_file_operation_keeps_its_buffer_until_it_is_over() {
    on_every_engine(|runtime| {
        let mut written = tempfile::tempfile().unwrap();
        let file = File::new(written.try_clone().unwrap().into());
        runtime.block_on(move || async move {
            for round in 0..200_u64 {
                let write = file.write_all_at(Data::copy_of(&[round as u8; 4096]), round * 4096);
                // Polled once, then dropped with the operation in the driver.
                let _ = blockhaul_io::timeout(Duration::ZERO, write).await;
            }
            file.sync().await.unwrap();
        });
        // It ends after its file operations.
        drop(runtime);
        // What was written is whole: never the bytes of a freed or reused buffer.
        written.flush().unwrap();
        written.rewind().unwrap();
        let mut all = Vec::new();
        std::io::Read::read_to_end(&mut written, &mut all).unwrap();
        for (round, block) in all.chunks(4096).enumerate() {
            let byte = block[0];
            assert!(byte == 0 || byte == round as u8, "block {round} starts with {byte}");
            assert!(block.iter().all(|&other| other == byte), "block {round} is torn");
        }
    });
}

#[test]
fn waiting_for_readiness_can_be_given_up() {
    on_every_engine(|runtime| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        runtime.block_on(move || async move {
            let listener = Listener::bind_unix(&path).unwrap();
            let client = Stream::connect_unix(&path).await.unwrap();
            let server = Stream::new(listener.accept().await.unwrap()).unwrap();
            for _ in 0..3 {
                blockhaul_io::timeout(Duration::from_millis(2), client.readable())
                    .await
                    .unwrap_err();
            }
            // The other end sees the close although this side had waited for it.
            drop(client);
            let mut byte = [0; 1];
            let mut bufs = [IoSliceMut::new(&mut byte)];
            let end = server.recv(&mut bufs);
            assert_eq!(
                blockhaul_io::timeout(Duration::from_secs(60), end).await.unwrap().unwrap(),
                0
            );
        });
    });
}

#[test]
fn receiving_can_be_given_up_and_leaves_the_window_at_its_end() {
    on_every_engine(|runtime| {
        let (near, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
        far.write_all(b"head").unwrap();
        runtime.block_on(move || async move {
            let stream = Stream::new(near.into()).unwrap();
            let mut window = RecvWindow::new();
            assert!(window.fill(&stream).await.unwrap());
            assert_eq!(window.bytes(), b"head");
            let wait = Duration::from_millis(5);
            blockhaul_io::timeout(wait, window.fill(&stream)).await.unwrap_err();
            if blockhaul_io::engine_name() == "uring" {
                assert_eq!(window.bytes(), b"");
                assert!(!window.fill(&stream).await.unwrap());
                assert!(!window.payload(&stream, &mut [0; 8]).await.unwrap());
            }
        });
        // The socket has no holder any more, not even the kernel.
        far.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(std::io::Read::read_to_end(&mut far, &mut Vec::new()).unwrap(), 0);
    });
}

#[test]
fn the_window_of_who_sends_little_stays_small() {
    on_every_engine(|runtime| {
        let (near, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
        let (sizes, whole) = runtime.block_on(move || async move {
            let stream = Stream::new(near.into()).unwrap();
            let mut window = RecvWindow::new();
            for _ in 0..100 {
                far.write_all(&[1; 100]).unwrap();
                assert!(window.fill(&stream).await.unwrap());
                window.consume(100);
            }
            let small = window.capacity();
            far.write_all(&[2; 128 << 10]).unwrap();
            let mut whole = true;
            while window.bytes().len() < 128 << 10 {
                whole &= window.fill(&stream).await.unwrap();
            }
            whole &= window.bytes().iter().all(|&byte| byte == 2);
            ((small, window.capacity()), whole)
        });
        assert_eq!(sizes, (4 << 10, 128 << 10));
        assert!(whole);
    });
}

#[test]
fn who_receives_much_lets_others_have_their_turn() {
    const PART: usize = 32 << 10;
    on_every_engine(|runtime| {
        let (near, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
        let sender = std::thread::spawn(move || far.write_all(&vec![7; 4 << 20]).unwrap());
        let turns = runtime.block_on(move || async move {
            let stream = Stream::new(near.into()).unwrap();
            let mut window = RecvWindow::new();
            let mut turns = 0;
            for _ in 0..(4 << 20) / PART {
                while window.bytes().len() < PART {
                    assert!(window.fill(&stream).await.unwrap());
                }
                // Everything has arrived: the task only waits for its turn.
                let mut payload = [0; PART];
                let mut whole = std::pin::pin!(window.payload(&stream, &mut payload));
                let at_once = std::future::poll_fn(|cx| Poll::Ready(whole.as_mut().poll(cx))).await;
                if at_once.is_pending() {
                    turns += 1;
                    assert!(whole.await.unwrap());
                }
            }
            turns
        });
        assert_eq!(turns, 4);
        sender.join().unwrap();
    });
}

#[test]
fn a_runtime_that_ends_closes_what_its_tasks_wait_for() {
    for engine in [IoEngine::Uring, IoEngine::Threads] {
        if engine == IoEngine::Uring && blockhaul_io::uring_available().is_err() {
            continue;
        }
        let runtime = Runtime::start(&RuntimeConfig { workers: 1, engine }).unwrap();
        let (near, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
        runtime.block_on(move || async move {
            let waiting = blockhaul_io::spawn(async move {
                let stream = Stream::new(near.into()).unwrap();
                RecvWindow::new().fill(&stream).await
            });
            blockhaul_io::sleep(Duration::from_millis(5)).await;
            drop(waiting);
        });
        drop(runtime);
        far.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let end = std::io::Read::read_to_end(&mut far, &mut Vec::new());
        assert_eq!(end.unwrap_or_else(|error| panic!("{engine:?}: {error}")), 0);
    }
}

#[test]
fn timers_fire_in_order_and_sleepers_wake_for_other_threads() {
    on_every_engine(|runtime| {
        let started = Instant::now();
        runtime.block_on(|| async {
            loop {
                let late = Instant::now() + Duration::from_millis(30);
                let second = blockhaul_io::spawn(async move {
                    blockhaul_io::sleep_until(late).await;
                    Instant::now()
                });
                let first = blockhaul_io::spawn(async move {
                    let mut sleep =
                        std::pin::pin!(blockhaul_io::sleep_until(late - Duration::from_millis(25)));
                    let begun =
                        std::future::poll_fn(|cx| Poll::Ready(sleep.as_mut().poll(cx))).await;
                    let in_time = Instant::now() < late;
                    if begun.is_pending() {
                        sleep.await;
                    }
                    (in_time, Instant::now())
                });
                let (in_time, first) = first.await;
                let second = second.await;
                // Again if this thread did not get to run before both slept.
                if in_time {
                    assert!(first <= second);
                    return;
                }
            }
        });
        assert!(started.elapsed() >= Duration::from_millis(30));
        let (completer, ticket) = blockhaul_io::ticket();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(10));
            completer.complete(42);
        });
        assert_eq!(runtime.block_on(|| ticket), Ok(42));
        assert_eq!(runtime.block_on(|| blockhaul_io::offload(|| 6 * 7)), Ok(42));
    });
}

#[test]
fn a_started_task_has_run_to_its_first_wait() {
    on_every_engine(|runtime| {
        runtime.block_on(|| async {
            let seen = std::rc::Rc::new(std::cell::Cell::new(0));
            let inner = seen.clone();
            let task = blockhaul_io::start(async move {
                inner.set(1);
                blockhaul_io::yield_now().await;
                inner.set(2);
            });
            assert_eq!(seen.get(), 1);
            // Dropping detaches: the task still runs to its end.
            drop(task);
            blockhaul_io::yield_now().await;
            blockhaul_io::yield_now().await;
            assert_eq!(seen.get(), 2);
        });
    });
}

#[test]
fn a_payload_that_is_here_is_handed_out_in_place_until_somebody_keeps_one() {
    on_every_engine(|runtime| {
        runtime.block_on(|| async {
            let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
            let stream = Stream::new(here.into()).unwrap();
            let mut there = there;
            let mut window = RecvWindow::new();
            there.write_all(b"abcdef").unwrap();
            assert!(window.fill(&stream).await.unwrap());
            assert!(window.payload_here(7).is_none(), "it has not come whole");
            assert_eq!(window.payload_here(2).unwrap().bytes(), b"ab");
            // The first is not held any more: new data reuses its memory.
            there.write_all(b"ghi").unwrap();
            assert!(window.fill(&stream).await.unwrap());
            let kept = window.payload_here(3).unwrap();
            assert_eq!((kept.bytes(), kept.slice(1, 2).bytes()), (&b"cde"[..], &b"de"[..]));
            let kept = kept.try_into_buf().unwrap_err();
            there.write_all(&[b'x'; 5000]).unwrap();
            assert!(window.fill(&stream).await.unwrap());
            assert_eq!(kept.bytes(), b"cde", "what is kept does not change");
            assert!(window.payload_here(1).is_none(), "the next might be kept, too");
            let mut rest = vec![0; 5004];
            assert!(window.payload(&stream, &mut rest).await.unwrap());
            assert_eq!((&rest[..4], &rest[4..]), (&b"fghi"[..], &[b'x'; 5000][..]));
            drop(kept);
            there.write_all(b"end").unwrap();
            assert!(window.fill(&stream).await.unwrap());
            assert!(window.payload_here(1).is_none(), "not on this connection");
        });
    });
}
