//! Synchronization: [`ticket`] (one value, any thread), [`Event`] (one worker, many waits) and
//! [`Notify`] (any thread, many waits).

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

/// A pair for one value: the [`Completer`] may be sent to any thread and is used once; awaiting the
/// [`Ticket`] yields the value. Dropping the ticket detaches it; it cancels nothing.
pub fn ticket<T>() -> (Completer<T>, Ticket<T>) {
    let shared = Arc::new(Mutex::new(TicketState::Empty(None)));
    (Completer { shared: Some(shared.clone()) }, Ticket { shared })
}

enum TicketState<T> {
    Empty(Option<Waker>),
    Full(T),
    /// The value was taken, or will never come.
    Over,
    /// The ticket was dropped.
    Abandoned,
}

/// The sending side of a [`ticket`].
pub struct Completer<T> {
    shared: Option<Arc<Mutex<TicketState<T>>>>,
}

impl<T> Completer<T> {
    /// Passes the value. If the ticket was dropped, the value is dropped here.
    pub fn complete(mut self, value: T) {
        if let Some(shared) = self.shared.take() {
            finish(&shared, TicketState::Full(value));
        }
    }

    /// Whether the ticket has been dropped.
    pub fn is_abandoned(&self) -> bool {
        let Some(shared) = &self.shared else { return true };
        matches!(*shared.lock().expect("no panic under this lock"), TicketState::Abandoned)
    }
}

impl<T> Drop for Completer<T> {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.take() {
            finish(&shared, TicketState::Over);
        }
    }
}

fn finish<T>(shared: &Mutex<TicketState<T>>, new: TicketState<T>) {
    let mut slot = shared.lock().expect("no panic under this lock");
    if let TicketState::Empty(waker) = &mut *slot {
        let waker = waker.take();
        *slot = new;
        drop(slot);
        if let Some(waker) = waker {
            waker.wake();
        }
    } else {
        // Abandoned: drop the value after the lock is released, as it may have a destructor.
        drop(slot);
        drop(new);
    }
}

/// The waiting side of a [`ticket`].
pub struct Ticket<T> {
    shared: Arc<Mutex<TicketState<T>>>,
}

/// The completer was dropped without a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostCompletion;

impl fmt::Display for LostCompletion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the operation was dropped without a result")
    }
}

impl std::error::Error for LostCompletion {}

impl<T> Future for Ticket<T> {
    type Output = Result<T, LostCompletion>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut slot = self.shared.lock().expect("no panic under this lock");
        match std::mem::replace(&mut *slot, TicketState::Over) {
            TicketState::Empty(_) => {
                *slot = TicketState::Empty(Some(cx.waker().clone()));
                Poll::Pending
            }
            TicketState::Full(value) => Poll::Ready(Ok(value)),
            TicketState::Over | TicketState::Abandoned => Poll::Ready(Err(LostCompletion)),
        }
    }
}

impl<T> Drop for Ticket<T> {
    fn drop(&mut self) {
        let mut slot = self.shared.lock().expect("no panic under this lock");
        let old = std::mem::replace(&mut *slot, TicketState::Abandoned);
        drop(slot);
        drop(old);
    }
}

/// A condition that tasks of any worker wait for.
///
/// Take a ticket with [`Notify::listen`] *before* checking the state that the condition guards,
/// then await it: a notification in between is not lost. Every waiter wakes. Notifying is cheap
/// without waiters.
#[derive(Default)]
pub struct Notify {
    /// Whether there may be waiters: a notification without any takes no lock.
    any: AtomicBool,
    waiting: Mutex<Vec<Completer<()>>>,
}

impl Notify {
    /// A ticket that completes at the next [`Notify::notify`].
    pub fn listen(&self) -> Ticket<()> {
        let (completer, ticket) = ticket();
        {
            let mut waiting = self.waiting.lock().expect("no panic under this lock");
            if waiting.len() == waiting.capacity() {
                // Drop abandoned waiters now, not at the next notification.
                waiting.retain(|completer| !completer.is_abandoned());
            }
            waiting.push(completer);
            self.any.store(true, Ordering::Relaxed);
        }
        // The caller checks its state after this; `notify` checks for waiters after its caller
        // changed it.
        fence(Ordering::SeqCst);
        ticket
    }

    /// Wakes all waiters.
    pub fn notify(&self) {
        fence(Ordering::SeqCst);
        if !self.any.load(Ordering::Relaxed) {
            return;
        }
        let woken = {
            let mut waiting = self.waiting.lock().expect("no panic under this lock");
            self.any.store(false, Ordering::Relaxed);
            std::mem::take(&mut *waiting)
        };
        woken.into_iter().for_each(|completer| completer.complete(()));
    }
}

/// A condition to wait for among the tasks of one worker: a counter of notifications.
///
/// Take [`Event::mark`] *before* checking the state that the event guards, then
/// [`Event::wait_after`] it: a notification in between is not lost. Every waiter wakes.
#[derive(Default)]
pub struct Event {
    count: Cell<u64>,
    waiting: RefCell<Vec<Waker>>,
}

impl Event {
    /// A new event without waiters.
    pub fn new() -> Event {
        Event::default()
    }

    /// Wakes all waiters.
    pub fn notify(&self) {
        self.count.set(self.count.get() + 1);
        let waiting = std::mem::take(&mut *self.waiting.borrow_mut());
        waiting.into_iter().for_each(Waker::wake);
    }

    /// The current count.
    pub fn mark(&self) -> u64 {
        self.count.get()
    }

    /// Waits until [`Event::notify`] has been called since `mark` was taken.
    pub async fn wait_after(&self, mark: u64) {
        poll_fn(|cx| {
            if self.count.get() != mark {
                return Poll::Ready(());
            }
            let mut waiting = self.waiting.borrow_mut();
            if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    #[test]
    fn a_ticket_yields_the_value_once() {
        let mut cx = Context::from_waker(Waker::noop());
        let (completer, ticket) = ticket();
        let mut ticket = pin!(ticket);
        assert_eq!(ticket.as_mut().poll(&mut cx), Poll::Pending);
        std::thread::spawn(move || completer.complete(7)).join().unwrap();
        assert_eq!(ticket.as_mut().poll(&mut cx), Poll::Ready(Ok(7)));
    }

    #[test]
    fn a_dropped_completer_is_an_error_and_a_dropped_ticket_is_seen() {
        let mut cx = Context::from_waker(Waker::noop());
        let (completer, lost) = ticket::<u8>();
        drop(completer);
        assert_eq!(pin!(lost).poll(&mut cx), Poll::Ready(Err(LostCompletion)));
        let (completer, waiter) = ticket::<u8>();
        drop(waiter);
        assert!(completer.is_abandoned());
    }

    #[test]
    fn notify_wakes_all_who_listen_on_any_thread_and_forgets_who_gave_up() {
        let notify = Arc::new(Notify::default());
        notify.notify();
        let mut first = notify.listen();
        let mut second = notify.listen();
        let mut cx = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut first).poll(&mut cx).is_pending(), "what was before does not count");
        let other = notify.clone();
        std::thread::spawn(move || other.notify()).join().unwrap();
        assert_eq!(Pin::new(&mut first).poll(&mut cx), Poll::Ready(Ok(())));
        assert_eq!(Pin::new(&mut second).poll(&mut cx), Poll::Ready(Ok(())));
        for _ in 0..1000 {
            drop(notify.listen());
        }
        assert!(notify.waiting.lock().unwrap().len() < 10, "those that gave up are not kept");
    }

    #[test]
    fn a_notification_between_mark_and_wait_is_not_lost() {
        let mut cx = Context::from_waker(Waker::noop());
        let event = Event::new();
        let mark = event.mark();
        event.notify();
        assert!(pin!(event.wait_after(mark)).poll(&mut cx).is_ready());
        assert!(pin!(event.wait_after(event.mark())).poll(&mut cx).is_pending());
    }
}
