//! Pipes: reads are retried, over a new connection too; writes while their connection works.

use std::io::{Read as _, Write as _};

use blockhaul_engine::{copy_from_pipe, copy_to_pipe};

use super::*;

fn bytes() -> Vec<u8> {
    content(&mut Rng::new(77), 1 << 20)
}

/// Copies to a pipe, and returns the output.
async fn read_out(source: &Stack) -> (Result<CopySummary, CopyError>, Vec<u8>) {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let collect = std::thread::spawn(move || {
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        all
    });
    // A few requests fill the pool; a retry must not wait for them.
    let pool = Pool::new(4 * Pool::cost(16 << 10));
    let progress = Arc::new(CopyProgress::new());
    let result = copy_to_pipe(source, writer.into(), &patient(), &pool, &progress).await;
    assert_eq!(pool.reserved(), 0, "all buffers are back");
    (result, collect.join().unwrap())
}

async fn write_in(target: &Stack) -> Result<CopySummary, CopyError> {
    let (reader, mut writer) = std::io::pipe().unwrap();
    // If the copy fails, nothing reads the rest.
    let feed = std::thread::spawn(move || drop(writer.write_all(&bytes())));
    let pool = Pool::new(4 * Pool::cost(16 << 10));
    let progress = Arc::new(CopyProgress::new());
    let result = copy_from_pipe(reader.into(), target, &patient(), &pool, &progress).await;
    assert_eq!(pool.reserved(), 0, "all buffers are back");
    feed.join().unwrap();
    result
}

#[test]
fn a_pipe_gets_all_bytes_in_order_however_often_reads_fail() {
    for kind in [Kind::Io, Kind::NoMemory, Kind::Disconnected, Kind::TimedOut] {
        on_worker(move || async move {
            let source = FaultDevice::over(disk(&bytes(), 1), 1);
            source.add(FaultRule::new(FaultEffect::Fail(kind)).kind(OpKind::Read).times(7));
            let (result, came) = read_out(&Stack::over(source)).await;
            assert_eq!(result.unwrap().retried.source_requests, 7, "{kind:?}");
            assert!(came == bytes());
        });
    }
    on_worker(|| async {
        let mut server = Server::new(disk(&bytes(), 1), 1);
        (*server.fuse.get_mut(), *server.cuts_left.get_mut()) = (9, 3);
        let (source, server) = server.open().await;
        let (result, came) = read_out(&source).await;
        assert_eq!(result.unwrap().retried.source_connections, 3);
        assert!(came == bytes());
        assert_eq!(server.dials.load(Ordering::SeqCst), 3);
    });
}

#[test]
fn a_read_that_fails_for_ever_ends_the_copy() {
    on_worker(|| async {
        let source = FaultDevice::over(disk(&[7; 1 << 20], 1), 1);
        let place = (512 << 10)..(513 << 10);
        source.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(OpKind::Read).range(place));
        let (result, came) = read_out(&Stack::over(source)).await;
        assert_eq!(result.unwrap_err().kind(), Kind::Io);
        assert_eq!(came.len(), 512 << 10, "what came before it is there");
    });
}

#[test]
fn what_came_from_a_pipe_is_written_again_while_the_connection_stands() {
    for (kind, passes) in [(Kind::Io, true), (Kind::NoMemory, true), (Kind::Disconnected, false)] {
        for op in [OpKind::Write, OpKind::Zero] {
            on_worker(move || async move {
                let all = disk(&vec![1; 1 << 20], 2);
                let target = FaultDevice::over(all.clone(), 2);
                target.add(FaultRule::new(FaultEffect::Fail(kind)).kind(op).times(5));
                let result = write_in(&Stack::over(target)).await;
                assert_eq!(result.is_ok(), passes, "{kind:?}, {op:?}: {result:?}");
                if let Ok(summary) = result {
                    assert_eq!(summary.retried.target_requests, 5);
                    assert!(all.bytes() == bytes());
                }
            });
        }
    }
}
