//! Words that are almost another one, for messages about typing errors.

/// The word that is nearest to what was typed, where it is near: a letter wrong, missing, too many or in
/// its neighbour's place, two of them in words of more than four letters.
pub(crate) fn nearest<'a>(typed: &str, words: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // What is longer is no word, and would take long to compare.
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
    let near = words.map(|word| (errors(typed, word), word)).filter(|(errors, _)| *errors <= most);
    near.min_by_key(|(errors, _)| *errors).map(|(_, word)| word)
}

/// Typing errors between two words.
fn errors(one: &str, other: &str) -> usize {
    let [one, other] = [one, other].map(|word| word.chars().collect::<Vec<_>>());
    // Errors between each beginning of one and of the other.
    let mut table = vec![vec![0; other.len() + 1]; one.len() + 1];
    for row in 0..=one.len() {
        for column in 0..=other.len() {
            table[row][column] = match (row, column) {
                (0, count) | (count, 0) => count,
                _ => {
                    let differ = usize::from(one[row - 1] != other[column - 1]);
                    let mut least = (table[row - 1][column - 1] + differ)
                        .min(table[row - 1][column] + 1)
                        .min(table[row][column - 1] + 1);
                    let swapped = row > 1
                        && column > 1
                        && one[row - 1] == other[column - 2]
                        && one[row - 2] == other[column - 1];
                    if swapped {
                        least = least.min(table[row - 2][column - 2] + 1);
                    }
                    least
                }
            };
        }
    }
    table[one.len()][other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_letters_wrong_missing_too_many_or_swapped() {
        for (one, other, count) in [
            ("", "", 0),
            ("memory", "memory", 0),
            ("memroy", "memory", 1),
            ("memoryy", "memory", 1),
            ("mmory", "memory", 1),
            ("mamory", "memory", 1),
            ("", "abc", 3),
            ("tape", "data", 3),
        ] {
            assert_eq!(errors(one, other), count, "{one} {other}");
            assert_eq!(errors(other, one), count, "{other} {one}");
        }
    }

    #[test]
    fn only_what_is_near_is_named() {
        let words = ["memory", "null", "sh", "data", "nbd+unix", "nbds+unix"];
        let nearest = |typed| nearest(typed, words.into_iter());
        assert_eq!(nearest("memroy"), Some("memory"));
        assert_eq!(nearest("nul"), Some("null"));
        assert_eq!(nearest("nbd-unix"), Some("nbd+unix"));
        for far in ["", "s", "ss", "tape", "python", &"x".repeat(1 << 20)] {
            assert_eq!(nearest(far), None, "{far:.20}");
        }
    }
}
