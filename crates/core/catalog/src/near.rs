//! Similar words, for messages about typing errors.

use strsim::osa_distance;

/// The word most similar to the typed one, if similar enough: one letter wrong, missing, extra or
/// swapped with its neighbour; two in words of more than four letters.
pub(crate) fn nearest<'a>(typed: &str, words: impl Iterator<Item = &'a str>) -> Option<&'a str> {
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
    let near =
        words.map(|word| (osa_distance(typed, word), word)).filter(|(errors, _)| *errors <= most);
    near.min_by_key(|(errors, _)| *errors).map(|(_, word)| word)
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
        for far in ["", "s", "ss", "tape", "python", &"x".repeat(1 << 20)] {
            assert_eq!(nearest(far), None, "{far:.20}");
        }
    }
}
