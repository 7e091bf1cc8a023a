//! A listener for a few peers on a worker, with a task for each: for metrics, and for sockets that control a
//! server.

use std::cell::Cell;
use std::future::poll_fn;
use std::io::IoSliceMut;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use blockhaul_io::{Completer, Listener, Stream, Ticket, WorkerHandle};

/// Interval of attempts to accept a peer after an error, such as too many open files.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

/// Serves at most `most` peers of a listener at a time, each in a task of the worker; more are
/// closed at once. Ends when the returned value is dropped, without waiting for connected peers.
pub fn serve<F, A>(
    listener: Listener,
    worker: &WorkerHandle,
    most: usize,
    attend: F,
) -> PeerListener
where
    F: Fn(Rc<Stream>) -> A + Send + 'static,
    A: Future<Output = ()> + 'static,
{
    let (stop, mut stopped) = blockhaul_io::ticket();
    drop(worker.spawn(move || async move {
        let busy = Rc::new(Cell::new(0));
        while let Some(accepted) = unless(&mut stopped, listener.accept()).await {
            let Ok(fd) = accepted else {
                blockhaul_io::sleep(ACCEPT_AGAIN).await;
                continue;
            };
            if busy.get() < most
                && let Ok(stream) = Stream::new(fd)
            {
                let attending = attend(Rc::new(stream));
                let place = PeerSlot::take(&busy);
                drop(blockhaul_io::spawn(async move {
                    attending.await;
                    drop(place);
                }));
            }
            // Peers that connect without a pause must not block others on this worker.
            blockhaul_io::yield_now().await;
        }
    }));
    PeerListener { _stop: stop }
}

/// The place of one connected peer.
struct PeerSlot(Rc<Cell<usize>>);

impl PeerSlot {
    fn take(busy: &Rc<Cell<usize>>) -> PeerSlot {
        busy.update(|count| count + 1);
        PeerSlot(busy.clone())
    }
}

impl Drop for PeerSlot {
    fn drop(&mut self) {
        self.0.update(|count| count - 1);
    }
}

/// Runs `work`, unless the other end of the ticket is dropped first.
pub async fn unless<T>(stopped: &mut Ticket<()>, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    poll_fn(|cx| match Pin::new(&mut *stopped).poll(cx) {
        Poll::Ready(_) => Poll::Ready(None),
        Poll::Pending => work.as_mut().poll(cx).map(Some),
    })
    .await
}

/// Appends received bytes, up to 4 KiB; false at the end of the stream.
///
/// # Errors
/// The stream failed.
pub async fn receive(peer: &Stream, received: &mut Vec<u8>) -> std::io::Result<bool> {
    let mut part = [0; 4096];
    let len = peer.recv(&mut [IoSliceMut::new(&mut part)]).await?;
    received.extend_from_slice(&part[..len]);
    Ok(len > 0)
}

/// A listener that accepts peers until it is dropped.
pub struct PeerListener {
    /// Dropped, it ends the listener.
    _stop: Completer<()>,
}
