//! One connection at a time: whoever connects waits until the one before has left.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::Completer;

/// The queue of those who wait for their turn.
#[derive(Default)]
pub struct Turns(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    taken: bool,
    waiting: VecDeque<Completer<Turn>>,
}

/// A turn; it passes on when dropped.
pub struct Turn(Arc<Turns>);

impl Turns {
    /// Waits for a turn, first come first served.
    pub async fn take(self: &Arc<Turns>) -> Option<Turn> {
        let ticket = {
            let mut queue = self.0.lock().expect("no panic under this lock");
            if !queue.taken {
                queue.taken = true;
                return Some(Turn(self.clone()));
            }
            let (completer, ticket) = crate::ticket();
            queue.waiting.push_back(completer);
            ticket
        };
        ticket.await.ok()
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let next = {
            let mut queue = self.0.0.lock().expect("no panic under this lock");
            let next = loop {
                match queue.waiting.pop_front() {
                    Some(completer) if completer.is_abandoned() => {}
                    next => break next,
                }
            };
            queue.taken = next.is_some();
            next
        };
        if let Some(next) = next {
            // Whoever gave up in the meantime drops the turn, which passes it on.
            next.complete(Turn(self.0.clone()));
        }
    }
}
