//! Work on many files at a time, most of which is waiting.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// The results of `work` on these items, in their order, on at most `threads` threads. Blocks.
///
/// # Errors
/// The first error of `work`, after which no other item is begun.
pub(crate) fn try_each<T: Sync, R: Send, E: Send>(
    threads: usize,
    items: &[T],
    work: impl Fn(&T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(items.len()));
    let failed = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(items.len()) {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(number) else { return };
                    match work(item) {
                        Ok(result) => {
                            done.lock()
                                .unwrap_or_else(PoisonError::into_inner)
                                .push((number, result));
                        }
                        Err(error) => {
                            next.store(items.len(), Ordering::Relaxed);
                            failed
                                .lock()
                                .unwrap_or_else(PoisonError::into_inner)
                                .get_or_insert(error);
                        }
                    }
                }
            });
        }
    });
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|(number, _)| *number);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_order_and_an_error_ends_the_work() {
        let items: Vec<_> = (0..1000).collect();
        let doubled = try_each(4, &items, |item| Ok::<_, ()>(2 * item)).unwrap();
        assert!(doubled.iter().zip(&items).all(|(double, item)| *double == 2 * item));
        let begun = AtomicUsize::new(0);
        let failed = try_each(1, &items, |item| {
            begun.fetch_add(1, Ordering::Relaxed);
            if *item == 10 { Err("ten") } else { Ok(()) }
        });
        assert_eq!((failed.unwrap_err(), begun.into_inner()), ("ten", 11));
        assert!(try_each(3, &items[..0], |_| Ok::<_, ()>(())).unwrap().is_empty());
    }
}
