//! Similar words, for messages about typing errors.

use strsim::osa_distance;

/// The word most similar to the typed one, if similar enough: one letter wrong, missing, extra or
/// swapped with its neighbour, two in words of more than four letters; or one that begins the typed
/// word (`gz` for `gzip`).
pub fn nearest<'a>(typed: &str, words: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // Longer input is not a word, and slow to compare.
    const LONGEST: usize = 40;
    let letters = typed.chars().count();
    if letters > LONGEST {
        return None;
    }
    let most = match letters {
        0..=2 => 0,
        3..=4 => 1,
        _ => 2,
    };
    let words: Vec<_> = words.collect();
    let near = words.iter().map(|word| (osa_distance(typed, word), *word));
    let near = near.filter(|(errors, _)| *errors <= most).min_by_key(|(errors, _)| *errors);
    let begun = || {
        // A common beginning of one letter says nothing.
        let is_begun =
            |word: &&str| word.len() > 1 && !word.contains('+') && typed.starts_with(*word);
        words.iter().copied().filter(is_begun).max_by_key(|word| word.len())
    };
    near.map(|(_, word)| word).or_else(begun)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_near_is_named() {
        let words = ["memory", "null", "sh", "data", "nbd+unix", "nbds+unix"];
        let nearest = |typed| nearest(typed, words.into_iter());
        for typed in ["memroy", "memoryy", "mmory", "mamory", "memory"] {
            assert_eq!(nearest(typed), Some("memory"), "{typed}");
        }
        assert_eq!(nearest("nul"), Some("null"));
        assert_eq!(nearest("nbd-unix"), Some("nbd+unix"));
        assert_eq!(nearest("datafile"), Some("data"));
        for far in ["", "s", "ss", "tape", "python", &"x".repeat(1 << 20)] {
            assert_eq!(nearest(far), None, "{far:.20}");
        }
    }
}
