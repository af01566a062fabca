"""The loops of both protocols: which detections find which objects."""

import numpy as np

from triops._cpu.jit import jit

SAMPLES = 41  # of a precision-recall curve


@jit
def match(
    begin, end, cells, min_overlaps, starts, candidates, overlaps, truth_states, found_states, scores, covered,
    truth_alphas, found_alphas, counts,
):  # fmt: skip
    """Fill `counts` [cells, SAMPLES, 4] with true positives, false positives, misses and the sum of similarities.

    A cell is a kind of overlap, a row of the states (a class at a difficulty) and a smallest overlap. States are 0 for
    what counts, 1 for what may be matched but does not count, -1 for what does not take part. A curve that has fewer
    samples leaves the rest of its row alone.
    """
    for cell in range(begin, end):
        kind, row = cells[cell, 0], cells[cell, 1]
        _match_cell(
            kind, min_overlaps[cell], starts[kind], candidates, overlaps, truth_states[row], found_states[row],
            scores, covered, truth_alphas, found_alphas, counts[cell],
        )  # fmt: skip


@jit
def _match_cell(
    kind, min_overlap, starts, candidates, overlaps, truth_state, found_state, scores, covered, truth_alphas,
    found_alphas, counts,
):  # fmt: skip
    # Objects that a detection may match, with those detections: a few per object, where the frame may have hundreds.
    objects, links, required = 0, 0, 0
    for g in range(truth_state.shape[0]):
        required += truth_state[g] == 0
        linked = 0
        if truth_state[g] >= 0:
            for p in range(starts[g], starts[g + 1]):
                linked += overlaps[p] > min_overlap and found_state[candidates[p]] >= 0
        objects += linked > 0
        links += linked
    first = np.empty(objects + 1, np.int64)
    truth = np.empty(objects, np.int64)
    link = np.empty(links, np.int64)
    value = np.empty(links, np.float64)
    objects, links = 0, 0
    for g in range(truth_state.shape[0]):
        before = links
        if truth_state[g] >= 0:
            for p in range(starts[g], starts[g + 1]):
                if overlaps[p] > min_overlap and found_state[candidates[p]] >= 0:
                    link[links] = candidates[p]
                    value[links] = overlaps[p]
                    links += 1
        if links > before:
            first[objects] = before
            truth[objects] = g
            objects += 1
    first[objects] = links

    taken = np.zeros(scores.shape[0], np.int64)  # the round in which a detection was matched last
    thresholds = np.empty(SAMPLES, np.float64)
    size = _thresholds(
        _matched_scores(first, truth, link, truth_state, found_state, scores, taken), required, thresholds
    )

    # Detections inside a DontCare region are no false positives; only the image has such regions.
    counted = np.empty(scores.shape[0], np.bool_)
    for d in range(scores.shape[0]):
        counted[d] = found_state[d] == 0 and not (kind == 0 and covered[d] > min_overlap)
    in_order = np.sort(scores[counted])

    for t in range(size):
        threshold = thresholds[t]
        hits, not_counted, not_false, similarity = 0, 0, 0, 0.0
        for o in range(objects):
            best, best_overlap, best_ignored = -1, 0.0, False
            for p in range(first[o], first[o + 1]):
                d = link[p]
                if taken[d] == t + 2 or scores[d] < threshold:
                    continue
                if found_state[d] == 0:
                    if value[p] > best_overlap:  # which one to be ignored leaves at 0
                        best, best_overlap, best_ignored = d, value[p], False
                elif best < 0:
                    best, best_ignored = d, True
            if best < 0:
                continue
            g = truth[o]
            taken[best] = t + 2
            not_false += counted[best]
            if truth_state[g] == 1:
                continue
            if best_ignored:
                not_counted += 1
                continue
            hits += 1
            similarity += (1.0 + np.cos(truth_alphas[g] - found_alphas[best])) / 2.0
        counts[t, 0] = hits
        counts[t, 1] = in_order.shape[0] - np.searchsorted(in_order, threshold) - not_false
        counts[t, 2] = required - hits - not_counted
        counts[t, 3] = similarity


@jit
def _matched_scores(first, truth, link, truth_state, found_state, scores, taken):
    """The scores of detections that find an object, when each object takes the one of highest score; ascending."""
    matched = np.empty(truth.shape[0], np.float64)
    count = 0
    for o in range(truth.shape[0]):
        best = -1
        for p in range(first[o], first[o + 1]):
            d = link[p]
            if taken[d] == 0 and (best < 0 or scores[d] > scores[best]):
                best = d
        if best < 0:
            continue
        taken[best] = 1
        if truth_state[truth[o]] == 0 and found_state[best] == 0:
            matched[count] = scores[best]
            count += 1
    return np.sort(matched[:count])


@jit
def _thresholds(scores, required, thresholds):
    """Fill in the scores at which recall comes nearest to each fortieth; returns how many there are."""
    size, recall = 0, 0.0
    for i in range(scores.shape[0]):
        here = (i + 1) / required
        last = i == scores.shape[0] - 1
        following = here if last else (i + 2) / required
        if following - recall < recall - here and not last:
            continue
        if size < thresholds.shape[0]:
            thresholds[size] = scores[scores.shape[0] - 1 - i]
            size += 1
        recall += 1 / (SAMPLES - 1.0)
    return size


@jit
def match_centers(begin, end, limits, truth_offsets, truth_centers, found_offsets, found_centers, matches):
    """Fill `matches` [limits, M] with the object that each detection finds, or -1, for frames `begin` to `end`.

    Detections of a frame come in falling order of their scores. Each takes the nearest object that is still free, where
    that is nearer than the limit.
    """
    for frame in range(begin, end):
        first, last = truth_offsets[frame], truth_offsets[frame + 1]
        free = np.empty(last - first, np.bool_)
        for k in range(limits.shape[0]):
            free[:] = True
            for d in range(found_offsets[frame], found_offsets[frame + 1]):
                best, nearest = -1, np.inf
                for g in range(first, last):
                    if free[g - first]:
                        x = truth_centers[g, 0] - found_centers[d, 0]
                        y = truth_centers[g, 1] - found_centers[d, 1]
                        distance = np.sqrt(x * x + y * y)
                        if distance < nearest:
                            best, nearest = g, distance
                if nearest < limits[k]:
                    free[best - first] = False
                    matches[k, d] = best
                else:
                    matches[k, d] = -1
